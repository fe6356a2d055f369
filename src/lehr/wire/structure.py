"""Builds values of types that hold a choice of several dataclasses, such as ``Valid | Invalid``.

msgspec decodes every other type by itself. A dataclass travels as a mapping of all its fields, so the
choice is the one whose fields are exactly those that came.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

Leaf = Callable[[Any, Any], Any]


class _Field(NamedTuple):
    name: str
    kind: Any


@lru_cache(maxsize=256)
def _fields(kind: Any) -> tuple[_Field, ...]:
    hints = get_type_hints(kind)
    return tuple(_Field(f.name, hints[f.name]) for f in dataclasses.fields(kind))


def structure(kind: Any, value: Any, leaf: Leaf) -> Any:
    """Return plain ``value`` as ``kind``. ``leaf`` converts what holds no dataclass. Raises ValueError."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, leaf)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _choice(kind, arguments, value, leaf)
    if origin is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(structure(arguments[0], item, leaf) for item in _items(kind, value))
    if origin is list:
        return [structure(arguments[0], item, leaf) for item in _items(kind, value)]
    if isinstance(origin, type) and issubclass(origin, Mapping) and isinstance(value, Mapping):
        return {leaf(arguments[0], key): structure(arguments[1], item, leaf) for key, item in value.items()}
    return leaf(kind, value)


def _items(kind: Any, value: Any) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"expected {kind}, got {type(value).__name__}")
    return list(value)


def _dataclass(kind: Any, value: Any, leaf: Leaf) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
    known = _fields(kind)
    unknown = set(value) - {field.name for field in known}
    if unknown:
        raise ValueError(f"{kind.__name__} has no field {', '.join(map(str, sorted(unknown)))}")
    try:
        return kind(**{f.name: structure(f.kind, value[f.name], leaf) for f in known if f.name in value})
    except TypeError as error:
        raise ValueError(str(error)) from error


def _choice(kind: Any, members: tuple[Any, ...], value: Any, leaf: Leaf) -> Any:
    if value is None and type(None) in members:
        return None
    if isinstance(value, Mapping):
        for member in members:
            if dataclasses.is_dataclass(member) and {f.name for f in _fields(member)} == set(value):
                return structure(member, value, leaf)
    others = [m for m in members if not dataclasses.is_dataclass(m) and m is not type(None)]
    if len(others) == 1:
        return structure(others[0], value, leaf)
    if others:
        return leaf(functools.reduce(operator.or_, others), value)
    if len(members) == 2 and type(None) in members:
        return structure(next(m for m in members if m is not type(None)), value, leaf)
    raise ValueError(f"{type(value).__name__} is none of {kind}")
