"""What a file that declares images says, and which file a name stands for.

    [base]                                      # build-env:base, also build-env
    base = "oci:bookworm.tar"                   # host, a root folder, an archive, or another declared image
    apt = ["gcc", "make"]
    pip = ["pytest==8.3.4", "wheels/own-1.0-py3-none-any.whl"]
    files = { "opt/words.txt" = "words.txt" }
    env = { CC = "gcc" }
    run = ["ldconfig"]

    [full]                                      # build-env:full
    base = "build-env:base"
    apt = ["cmake"]

    [setup.compile_project]                     # what `setup: [compile_project]` of a task means
    run = ["make -j2"]
    timeout = 300

``NAME:VARIANT`` is the table ``[VARIANT]`` of ``NAME.toml``: in ``images`` beside the file that names it, in
``./images``, or in ``images.d`` beside the folder of built images. A path that ends in ``.toml`` is that file.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from pydantic import Field, field_validator

from lehr.core.config import Config, resolve
from lehr.core.errors import ConfigError, HostUnfit
from lehr.sandbox.images.store import home_folder

USUAL = "base"
"""The variant that a name without one means."""
SETUP = "setup"
RESERVED = frozenset({"host", "oci", "docker"})
OWN = frozenset({"dev", "proc", "run", "sys", "tmp", "work"})
"""What a box makes itself, whatever the image holds there."""
KINDS = "host, /a/root/folder, oci:/an/archive.tar, docker:/an/archive.tar, or a declared NAME:VARIANT"
ARCHIVES = (".whl", ".tar.gz", ".zip")
"""How an entry of ``pip`` ends that is a file beside the declaration."""
_WORD = r"[A-Za-z0-9][A-Za-z0-9_.-]*"
_NAME = re.compile(rf"({_WORD})(?::({_WORD}))?")
_FILE = re.compile(rf"(.+\.toml)(?::({_WORD}))?", re.DOTALL)
_DEBIAN = re.compile(r"[a-z0-9][a-z0-9+.-]+(?::[a-z0-9]+)?(?:=[A-Za-z0-9.+:~-]+)?")
_PYTHON = re.compile(
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?(?:\[[A-Za-z0-9._, -]*\])?"
    r"(?:\s*(?:===|==|~=|!=|<=|>=|<|>)\s*[A-Za-z0-9.*+!_-]+(?:\s*,\s*(?:==|~=|!=|<=|>=|<|>)\s*[A-Za-z0-9.*+!_-]+)*)?"
    r"(?:\s*;[^\n]*)?"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Step(Config):
    """A table ``[setup.NAME]``: commands that a task's ``setup`` names."""

    run: tuple[str, ...] = Field(min_length=1)
    """Shell command lines, run one after the other in the working folder of a box."""
    timeout: float = Field(60.0, gt=0)
    """Seconds for all of them together."""
    network: bool = False
    """Always false: boxes have no network."""

    @field_validator("network")
    @classmethod
    def _none(cls, value: bool) -> bool:
        if value:
            raise ValueError("a set-up step has no network; fetch in `apt`, `pip` or `run` of the image")
        return value


class Layer(Config):
    """A table ``[VARIANT]``: an image, as what is added to another one."""

    base: str = "host"
    """What it stands on."""
    apt: tuple[str, ...] = ()
    """Debian packages, best with ``=VERSION``; not on ``host``."""
    pip: tuple[str, ...] = ()
    """Python requirements, best with ``==VERSION``, and wheels or source archives beside the file."""
    files: dict[str, str] = Field(default_factory=dict[str, str])
    """Files and folders: where in the image, and where from, beside the file."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Variables of every program in a box of the image."""
    run: tuple[str, ...] = ()
    """Shell command lines, run one after the other as root of the image, with the network of the host."""
    timeout: float = Field(1800.0, gt=0)
    """Seconds for each step of the build."""

    @field_validator("apt")
    @classmethod
    def _debian(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            if not _DEBIAN.fullmatch(entry):
                raise ValueError(f"{entry!r} is no Debian package; write NAME or NAME=VERSION")
        return value

    @field_validator("pip")
    @classmethod
    def _python(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for entry in value:
            if not _PYTHON.fullmatch(entry) and not is_archive(entry):
                raise ValueError(
                    f"{entry!r} is no requirement; write NAME==VERSION, or a file that ends in .whl"
                )
        return value

    @field_validator("files")
    @classmethod
    def _inside(cls, value: dict[str, str]) -> dict[str, str]:
        found = {_destination(where): source for where, source in value.items()}
        if len(found) < len(value):
            raise ValueError("two entries are the same place in the image")
        return found

    @field_validator("env")
    @classmethod
    def _variables(cls, value: dict[str, str]) -> dict[str, str]:
        for name, text in value.items():
            if not _VARIABLE.fullmatch(name) or "\0" in text:
                raise ValueError(f"{name!r} is no name of a variable")
        return value

    @property
    def loose(self) -> list[str]:
        """What may be another version the next time it is built."""
        return [
            *(entry for entry in self.apt if "=" not in entry),
            *(entry for entry in self.pip if "==" not in entry and not is_archive(entry)),
        ]


@dataclass(frozen=True, slots=True)
class Declared:
    """An image as a file declares it.

    name: as a person would write it. key: ``FILE:VARIANT`` with an absolute path, the same from everywhere.
    layer: with an absolute ``base``. steps: those of its file, and those of a declared base.
    """

    name: str
    file: Path
    variant: str
    layer: Layer
    steps: Mapping[str, Step]

    @property
    def key(self) -> str:
        """The name that is the same from everywhere."""
        return f"{self.file}:{self.variant}"

    def source(self, path: str) -> Path:
        """Return where something lies that the file names."""
        return self.file.parent / path


def is_archive(entry: str) -> bool:
    """Whether an entry of ``pip`` is a file."""
    return entry.endswith(ARCHIVES) and not entry.startswith("-")


def is_declared(name: str) -> bool:
    """Whether a name can only mean a declared image."""
    if _FILE.fullmatch(name):
        return True
    found = _NAME.fullmatch(name)
    return found is not None and found[1] not in RESERVED


def places(beside: Path | None = None) -> list[Path]:
    """Return the folders in which names are looked up, in order. beside: the folder of the file that names."""
    found = [beside / "images"] if beside is not None else []
    return [*found, Path("images"), home_folder() / "images.d"]


def locate(name: str, beside: Path | None = None) -> tuple[Path, str] | None:
    """Return the file and the variant (empty: the usual one) that a name stands for, or None."""
    if path := _FILE.fullmatch(name):
        return (beside or Path()).joinpath(path[1]).resolve(), path[2] or ""
    found = _NAME.fullmatch(name)
    if found is None or found[1] in RESERVED:
        return None
    for folder in places(beside):
        file = folder / f"{found[1]}.toml"
        if file.is_file():
            return file.resolve(), found[2] or ""
    return None


def absolute(name: str, beside: Path) -> str:
    """Return the name of an image as it means the same from everywhere, or as it is where nothing is there.

    beside: the folder of the file that names it, from which relative paths start.
    """
    if place := locate(name, beside):
        file, variant = place
        return f"{file}:{variant}" if variant else str(file)
    kind, colon, path = name.partition(":")
    if colon and kind in RESERVED:
        return f"{kind}:{beside.joinpath(path).resolve()}"
    is_path = name.startswith(".") or ("/" in name and beside.joinpath(name).is_dir())
    return str(beside.joinpath(name).resolve()) if is_path else name


def read(name: str, beside: Path | None = None) -> Declared:
    """Return the declared image of a name. Raises ``HostUnfit`` where there is none, ``ConfigError`` where its
    file cannot be used.
    """
    return _read(name, beside, ())


def _read(name: str, beside: Path | None, above: tuple[str, ...]) -> Declared:
    place = locate(name, beside)
    if place is None:
        raise _unknown(name, beside)
    file, variant = place
    tables, steps = _tables(file)
    variant = variant or _usual(file, tables)
    if variant not in tables:
        near = difflib.get_close_matches(variant, tables, n=1)
        raise ConfigError(
            f"{file} declares no image [{variant}]",
            expected=f"one of {', '.join(tables) or 'none: it has no table'}",
            hint=f"Did you mean {file.stem}:{near[0]}?" if near else "",
        )
    key = f"{file}:{variant}"
    if key in above:
        loop = " -> ".join((*above[above.index(key) :], key))
        raise ConfigError(f"images stand on each other: {loop}", expected="a chain that ends in another base")
    layer = resolve(Layer, tables[variant], where=f"{file}, [{variant}]")
    base = _base(layer.base, file.parent)
    if is_declared(base):
        steps = {**_read(base, file.parent, (*above, key)).steps, **steps}
    return Declared(f"{file.stem}:{variant}", file, variant, layer.model_copy(update={"base": base}), steps)


def _base(name: str, folder: Path) -> str:
    """Return the base of an image: names are looked up in its own folder first."""
    found = _NAME.fullmatch(name)
    if found and found[1] not in RESERVED and (own := folder / f"{found[1]}.toml").is_file():
        return f"{own}:{found[2]}" if found[2] else str(own)
    return absolute(name, folder)


def _tables(file: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Step]]:
    """Return the images and the set-up steps of a file."""
    try:
        raw = tomllib.loads(file.read_text())
    except OSError as error:
        raise HostUnfit(f"cannot read the image {file}: {error.strerror}", expected="a file in TOML") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {error}", expected="valid TOML") from error
    if _holds_nul(raw):
        raise ConfigError(f"{file} holds a NUL character", expected="text that programs can be given")
    steps: object = raw.pop(SETUP, {})
    tables = {name: _table(file, name, value) for name, value in raw.items()}
    named = {
        name: resolve(Step, _table(file, f"{SETUP}.{name}", step), where=f"{file}, [{SETUP}.{name}]")
        for name, step in _table(file, SETUP, steps).items()
    }
    return tables, named


def _holds_nul(value: object) -> bool:
    if isinstance(value, dict):
        return any(_holds_nul(item) for pair in cast("dict[str, object]", value).items() for item in pair)
    if isinstance(value, list):
        return any(map(_holds_nul, cast("list[object]", value)))
    return isinstance(value, str) and "\0" in value


def _table(file: Path, name: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(
            f"{file}: {name!r} is no table, but {value!r}",
            expected="tables such as [base], each an image, and [setup.NAME]",
        )
    return cast("dict[str, Any]", value)


def _usual(file: Path, tables: Mapping[str, object]) -> str:
    if USUAL in tables or len(tables) != 1:
        return USUAL
    (only,) = tables
    return only


def _unknown(name: str, beside: Path | None) -> HostUnfit:
    near = difflib.get_close_matches(name, list(names(beside)), n=2)
    looked = ", ".join(str(folder / f"{name.partition(':')[0]}.toml") for folder in places(beside))
    hint = f"Did you mean {' or '.join(near)}?" if near else f"Looked for {looked}."
    return HostUnfit(f"there is no image {name!r}", expected=KINDS, hint=hint)


def names(beside: Path | None = None) -> Iterator[str]:
    """Yield every name that can be given; of a file that cannot be read, its own."""
    seen: set[str] = set()
    for folder in places(beside):
        for file in sorted(folder.glob("*.toml")):
            if file.stem in seen or file.stem in RESERVED or not _NAME.fullmatch(file.stem):
                continue
            seen.add(file.stem)
            try:
                tables, _ = _tables(file)
            except (ConfigError, HostUnfit):
                yield file.stem
            else:
                yield from (f"{file.stem}:{variant}" for variant in tables)


def _destination(where: str) -> str:
    path = PurePosixPath(where.lstrip("/"))
    if not path.parts or ".." in path.parts or "\0" in where:
        raise ValueError(f"{where!r} is no place in an image; write a path such as opt/data/words.txt")
    if path.parts[0] in OWN:
        raise ValueError(f"{where!r}: a box makes /{path.parts[0]} itself, whatever the image holds there")
    return str(path)
