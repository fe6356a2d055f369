"""Opens domains by name and hands out their problems."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from lehr.core.errors import ConfigError, UnknownName
from lehr.core.task import Problem, Split
from lehr.domains.base import DomainCard, Environment, Source
from lehr.domains.card import BUILT_IN, find_cards
from lehr.domains.environments import ENVIRONMENTS
from lehr.sandbox import roots
from lehr.sandbox.images import declaration
from lehr.sandbox.taskbox import named_steps


@runtime_checkable
class FolderSource(Protocol):
    """A source that reads files of its domain's folder."""

    def bind(self, folder: Path) -> Source:
        """Return the source for the domain that stands in ``folder``."""
        ...


class Domain:
    """A domain on disk. Its code is loaded when the first problem is asked for.

    digest: 8 hex digits over everything in the folder and the code of its generator; part of every task's
    id, so that an id names the same task always.
    """

    def __init__(self, card: DomainCard, folder: Path) -> None:
        self.card = card
        self.folder = folder

    def problem(self, split: Split, index: int) -> Problem:
        """Return problem ``index`` of ``split``; the same one for the same arguments always.

        Raises ``ConfigError`` for an index or split that the card does not have.
        """
        size = self.card.splits.get(split, 0)
        if not 0 <= index < size:
            raise ConfigError(
                f"{self.card.id} has no task {index} in split {split!r}", expected=f"an index below {size}"
            )
        made = self._source.problem(self.card, split, index)
        name = f"{self.card.id}@{self.digest}/{split}/{index}"
        image = declaration.absolute(made.task.image, self.folder.resolve())
        return Problem(made.task.model_copy(update={"id": name, "image": image}), made.gold)

    def environment(self) -> Environment:
        """Return the environment that runs this domain's episodes."""
        return ENVIRONMENTS.get(self.card.environment)

    def make_ready(self, say: Callable[[str], object] = lambda _: None) -> None:
        """Build the image that the domain's boxes are made from, if a file declares one; ``say`` hears what is
        done. Raises ``ConfigError`` for a set-up step that is not declared, and what building raises.
        """
        image = declaration.absolute(self.card.image, self.folder.resolve())
        if self.card.setup:
            named_steps(image, self.card.setup)
        if declaration.locate(image):
            roots.make(image, say)

    @cached_property
    def digest(self) -> str:
        """8 hex digits of the domain's content."""
        digest = hashlib.blake2b(digest_size=4)
        for file in (*_content(self.folder), *self._shared_code()):
            inside = file.is_relative_to(self.folder)
            name = str(file.relative_to(self.folder)) if inside else file.name
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def _shared_code(self) -> list[Path]:
        """What a built-in generator consists of beside the domain's own folder."""
        module = self.card.generator.partition(":")[0]
        if not module.startswith("lehr.domains."):
            return []
        generator = BUILT_IN.joinpath(*module.split(".")[2:]).with_suffix(".py")
        files = (generator, BUILT_IN / "splitting.py")
        return [file for file in files if file.is_file() and not file.is_relative_to(self.folder)]

    @cached_property
    def _source(self) -> Source:
        source = _load(self.card.generator, self.folder)
        return source.bind(self.folder) if isinstance(source, FolderSource) else cast(Source, source)


def find_domains(paths: Iterable[Path | str] = ()) -> dict[str, Domain]:
    """Return every domain by id: built-in ones, those in ``./domains``, and those below ``paths``."""
    return {name: Domain(card, folder) for name, (card, folder) in sorted(find_cards(paths).items())}


def open_domain(name: str, paths: Iterable[Path | str] = ()) -> Domain:
    """Return one domain. Raises ``UnknownName`` with near matches."""
    found = find_domains(paths)
    if name not in found:
        raise UnknownName.among("domain", name, found, hint="`lehr domains list` shows all of them.")
    return found[name]


def _content(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith(".")
    )


def _load(generator: str, folder: Path) -> object:
    module_name, colon, attribute = generator.partition(":")
    if not colon:
        raise ConfigError(f"cannot read generator {generator!r}", expected="module:object or file.py:object")
    try:
        if module_name.endswith(".py"):
            module = _load_file(folder / module_name)
        else:
            module = importlib.import_module(module_name)
        return getattr(module, attribute)
    except (ImportError, AttributeError, FileNotFoundError) as error:
        raise ConfigError(
            f"the generator {generator!r} of {folder} cannot be loaded: {error}",
            hint=f"Correct `generator` in {folder / 'domain.toml'}.",
        ) from error


def _load_file(file: Path) -> object:
    name = f"lehr_domain_{hashlib.blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"no such file: {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
