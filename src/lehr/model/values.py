"""Reads a model folder's JSON files and single values in them: a wrong value is named by its key."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from lehr.core.errors import ConfigError

MOST = 1 << 24
"""Above every size that a model has: what is larger was meant otherwise."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in ``path``, {} where there is no such file; raise :class:`ConfigError` if broken."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {error}", expected="a JSON object") from error
    if not isinstance(value, dict):
        raise ConfigError(f"cannot use {path}: it holds a {type(value).__name__}", expected="a JSON object")
    return value


def count(raw: Mapping[str, Any], key: str, *, default: int | None = None, most: int = MOST) -> int:
    """Return a whole number from 1 to ``most``. Without a default, a missing key raises ``KeyError``."""
    value = raw[key] if default is None else raw.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _wrong(key, value, f"a whole number from 1 to {most}")
    return value


def positive(raw: Mapping[str, Any], key: str, default: float) -> float:
    """Return a finite number above 0."""
    value = raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _wrong(key, value, "a finite number above 0")
    return float(value)


def token_ids(raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return token ids, of which a key may have none, one, or a list; -1 is none, as old files have it."""
    value = raw.get(key)
    if value is None:
        return ()
    ids = cast("list[Any]", value) if isinstance(value, list) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) or not -1 <= one < MOST for one in ids):
        raise _wrong(key, value, f"token ids below {MOST}")
    return tuple(one for one in ids if one >= 0)


def table(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return an object, empty where there is none."""
    value = raw.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _wrong(key, value, "an object")
    return cast("dict[str, Any]", value)


def _wrong(key: str, value: object, expected: str) -> ConfigError:
    return ConfigError(f"{key} is {value!r}", expected=expected, hint="Correct it, or fetch the model again.")
