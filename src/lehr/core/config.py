"""Frozen configuration: unknown keys are errors that name the nearest known key."""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lehr.core.errors import ConfigError

C = TypeVar("C", bound="Config")

Count = Annotated[int, Field(ge=1, lt=1 << 31)]
"""A number of things of which there is at least one."""

Dtype = Literal["auto", "float32", "bfloat16"]
"""What to compute in, as ``lehr.model.dtype`` knows it."""


class Config(BaseModel):
    """Base of every configuration class. Frozen; a field is documented under the field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    def digest(self) -> str:
        """Return 16 hex digits that change when any resolved value changes."""
        return digest_of(self.model_dump(mode="json"))


def digest_of(values: Mapping[str, Any]) -> str:
    """Return the digest of a dumped configuration, also of one that an older version wrote."""
    text = json.dumps(values, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def load(kind: type[C], path: Path, overrides: Iterable[str] = ()) -> C:
    """Read ``path`` (TOML), apply ``key.sub=value`` overrides and validate.

    Raises :class:`ConfigError` that names the file, the key, and the nearest known key.
    """
    try:
        raw = tomllib.loads(path.read_text("utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(f"no such file: {path}", hint="Check the path.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}", expected="valid TOML") from error
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", expected="a TOML file", hint="Check the path."
        ) from error
    return resolve(kind, raw, overrides, where=str(path))


def resolve(
    kind: type[C], raw: Mapping[str, Any], overrides: Iterable[str] = (), *, where: str = "config"
) -> C:
    """Validate ``raw`` after applying overrides such as ``stages.2.steps=12`` (values read as TOML).

    Values have the type that is asked for: neither ``"3"`` nor ``true`` is a number.
    """
    tree: dict[str, Any] = json.loads(json.dumps(raw, default=str))
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"cannot read the override {item!r}", expected="key=value, for example seed=7")
        try:
            value: Any = tomllib.loads(f"v = {text}")["v"]
        except tomllib.TOMLDecodeError:
            value = text
        _assign(tree, key.split("."), value, item)
    try:
        return kind.model_validate_json(json.dumps(tree, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(kind, error, tree)}") from error


def _assign(tree: Any, keys: list[str], value: Any, item: str) -> None:
    *parents, last = keys
    for key in parents:
        if isinstance(tree, list):
            tree = cast("list[Any]", tree)
            if not key.isdigit() or int(key) >= len(tree):
                raise ConfigError(f"override {item!r}: {key!r} is not an index below {len(tree)}")
            tree = tree[int(key)]
        else:
            tree = tree.setdefault(key, {})
    if isinstance(tree, list):
        tree = cast("list[Any]", tree)
        if not last.isdigit() or int(last) >= len(tree):
            raise ConfigError(f"override {item!r}: {last!r} is not an index below {len(tree)}")
        tree[int(last)] = value
    elif isinstance(tree, dict):
        tree[last] = value
    else:
        raise ConfigError(f"override {item!r}: {'.'.join(parents)} is a value, not a table")


def explain(kind: type[BaseModel], error: ValidationError, given: Any) -> str:
    """Return one line per problem of ``given``, with its key as it is typed; for an unknown key, with the
    nearest ones known at its place.
    """
    lines: list[str] = []
    problems = error.errors()
    inner = {item["loc"][0] for item in problems if len(item["loc"]) > 1}
    for item in problems:
        if item["type"] == "too_short" and item["loc"][0] in inner:
            continue  # what is in it could not be read, and so it counts as empty
        path = ".".join(_keys(item["loc"], given))
        if item["type"] == "extra_forbidden":
            lines.append(f"unknown key {path!r}; {_known(kind, item['loc'])}")
        elif item["type"] == "missing":
            lines.append(f"the key {path!r} is missing")
        elif item["type"] == "tuple_type":
            lines.append(f"{path}: expected a list in brackets (got {item.get('input')!r})")
        elif item["type"] == "value_error":
            text = item["msg"].removeprefix("Value error, ")
            lines.append(f"{path}: {text}" if path else text)
        else:
            lines.append(f"{path or 'value'}: {item['msg']} (got {item.get('input')!r:.200})")
    return "\n  ".join(lines)


def _keys(loc: Iterable[int | str], given: Any) -> Iterable[str]:
    """Yield the keys that lead to ``loc``, without the types that tagged unions put between them."""
    for part in loc:
        if isinstance(given, dict):
            table = cast("dict[Any, Any]", given)
            if part not in table and part == table.get("type"):
                continue
            given = table.get(part)
        elif isinstance(given, list) and isinstance(part, int):
            entries = cast("list[Any]", given)
            given = entries[part] if part < len(entries) else None
        yield str(part)


def _known(kind: type[BaseModel], loc: Sequence[int | str]) -> str:
    """Return what to say after an unknown key: the nearest keys of its level, else where it belongs and all of
    the level.
    """
    level, key = _level(kind, loc[:-1]), str(loc[-1])
    names = sorted({name for model in level for name in model.model_fields})
    near = difflib.get_close_matches(key, names, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    deeper = sorted({path for model in level for path in _paths_to(model, key, ())})
    belongs = f"{' or '.join(map(repr, deeper[:3]))} exists; " if deeper else ""
    return f"{belongs}known keys: {', '.join(names)}"


def _level(kind: type[BaseModel], loc: Iterable[int | str]) -> list[type[BaseModel]]:
    """Return the models that may stand at ``loc``; in a union, the one whose ``type`` was named."""
    level = [kind]
    for part in loc:
        below = [
            found
            for model in level
            if str(part) in model.model_fields
            for found in _models_in(model.model_fields[str(part)].annotation)
        ]
        tagged = [m for m in level if "type" in m.model_fields and m.model_fields["type"].default == part]
        level = below or tagged or level
    return level


def _paths_to(kind: type[BaseModel], key: str, above: tuple[str, ...]) -> Iterable[str]:
    """Yield where below ``kind`` a key of this name stands, dotted."""
    for name, field in kind.model_fields.items():
        for model in _models_in(field.annotation):
            if key in model.model_fields:
                yield ".".join((*above, name, key))
            yield from _paths_to(model, key, (*above, name))


def _models_in(annotation: Any) -> Iterable[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
