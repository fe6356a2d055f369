"""Compares plain values by exact type, in the trusted process."""

from __future__ import annotations

from typing import Any, cast


def same(got: Any, want: Any) -> bool:
    """Whether two plain values are equal and of the same types throughout. NaN equals nothing.

    ``True`` is not ``1``, ``2.0`` is not ``2``, a tuple is not a list; dictionaries compare without order.
    """
    if type(got) is not type(want):
        return False
    if isinstance(want, list | tuple):
        left, right = cast("list[Any]", got), cast("list[Any]", want)
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(want, dict):
        mine, theirs = cast("dict[Any, Any]", got), cast("dict[Any, Any]", want)
        return _keys(mine) == _keys(theirs) and all(same(mine[key], theirs[key]) for key in theirs)
    if isinstance(want, set | frozenset):
        return _keys(cast("set[Any]", got)) == _keys(cast("set[Any]", want))
    if want is None or isinstance(want, bool | int | float | str | bytes):
        return bool(got == want)
    return False


def _keys(items: Any) -> set[tuple[type, Any]]:
    return {(type(item), item) for item in items}
