"""Builds values of types that hold a choice of several dataclasses, such as ``Valid | Invalid``.

msgspec decodes every other type by itself. A dataclass travels as a mapping of all its fields, so the
choice is the one whose fields are exactly those that came.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

Leaf = Callable[[Any, Any], Any]
"""Converts plain data to a type that holds no choice of dataclasses."""


@lru_cache(maxsize=256)
def _fields(kind: type) -> dict[str, Any]:
    """Return the annotation of each field of a dataclass, in order."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def structure(kind: Any, value: Any, leaf: Leaf) -> Any:
    """Return plain ``value`` as ``kind``. Raises ``ValueError`` where it does not fit."""
    if _is_dataclass(kind):
        return _dataclass(kind, value, leaf)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _choice(kind, arguments, value, leaf)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(structure(arguments[0], item, leaf) for item in _items(kind, value))
    if origin is list:
        return [structure(arguments[0], item, leaf) for item in _items(kind, value)]
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        key_kind, item_kind = arguments
        pairs = cast("Mapping[Any, Any]", value).items()
        return {leaf(key_kind, key): structure(item_kind, item, leaf) for key, item in pairs}
    return leaf(kind, value)


def _is_dataclass(kind: Any) -> bool:
    return isinstance(kind, type) and dataclasses.is_dataclass(kind)


def _items(kind: Any, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"expected {kind}, got {type(value).__name__}")
    return cast("list[Any]", value)


def _dataclass(kind: type, value: Any, leaf: Leaf) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
    given, known = cast("Mapping[Any, Any]", value), _fields(kind)
    unknown = [str(name) for name in given if name not in known]
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}")
    try:
        return kind(**{name: structure(known[name], item, leaf) for name, item in given.items()})
    except TypeError as error:
        raise ValueError(str(error)) from error


def _choice(kind: Any, members: tuple[Any, ...], value: Any, leaf: Leaf) -> Any:
    if value is None and type(None) in members:
        return None
    names = set(cast("Mapping[Any, Any]", value)) if isinstance(value, Mapping) else None
    for member in members:
        if _is_dataclass(member) and set(_fields(member)) == names:
            return _dataclass(member, value, leaf)
    others = [m for m in members if not _is_dataclass(m) and m is not type(None)]
    for member in others:
        try:
            return structure(member, value, leaf)
        except ValueError:
            if member is others[-1]:
                raise
    raise ValueError(f"what came is none of {kind}")
