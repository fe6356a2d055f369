"""What a request may ask and which weights may come next: alike in every engine."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from numbers import Integral, Real
from operator import index
from typing import TypeGuard, cast

import numpy as np
from numpy.typing import NDArray

from lehr.core.trace import Constraint, Sampling, Version
from lehr.engine.base import EngineError, RequestTooLarge

LEAST_TEMPERATURE = 1e-6
"""Above 0; logits that are divided by much less overflow float32."""


def token_ids(tokens: Sequence[int]) -> list[int]:
    """Return ``tokens`` as a list of whole numbers. Raises :class:`EngineError` for anything else."""
    try:
        return [index(token) for token in tokens]
    except TypeError as error:
        raise EngineError(
            f"the prompt is not a sequence of token ids: {error}", expected="whole numbers"
        ) from error


def packed_ids(tokens: Sequence[int]) -> NDArray[np.int32]:
    """Return ``tokens`` as int32. Raises :class:`EngineError` for what is no token id of any model."""
    ids = token_ids(tokens)
    wrong = next((i for i in ids if not -(1 << 31) <= i < 1 << 31), None)
    if wrong is not None:
        raise EngineError(f"token {wrong} is outside any vocabulary", expected="ids that int32 can hold")
    return np.array(ids, np.int32)


def require_servable(
    prompt: Sequence[int], sampling: Sampling, *, room: int, vocab_size: int, knows_text: bool, widen: str
) -> None:
    """Raise :class:`RequestTooLarge` or :class:`EngineError` unless the request can be served.

    room: tokens that a prompt and its completion may have together. knows_text: whether stop strings can be
    found. widen: what gives more room, as an instruction.
    """
    require_sampling(sampling)
    longest = len(prompt) + sampling.max_tokens
    if longest > room:
        raise RequestTooLarge(
            f"{len(prompt)} prompt tokens and up to {sampling.max_tokens} new ones cannot fit",
            expected=f"at most {room} together",
            hint=f"Shorten the prompt, lower max_tokens or {widen}.",
        )
    if not prompt:
        raise EngineError("the prompt is empty", expected="at least one token")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise EngineError(
            f"token {min(prompt) if min(prompt) < 0 else max(prompt)} is outside the vocabulary",
            expected=f"ids from 0 to {vocab_size - 1}",
        )
    if any(sampling.stop) and not knows_text:
        raise EngineError("stop strings need a tokenizer, and this engine was built without one")


def require_sampling(sampling: Sampling) -> None:
    """Raise :class:`EngineError` for settings that no engine can draw with: callers share its steps, so that
    what one of them asks for must not fail there.
    """
    s = sampling
    faults = {
        "max_tokens": None if _whole(s.max_tokens) and s.max_tokens >= 0 else "a whole number, 0 or more",
        "temperature": None if _is_temperature(s.temperature) else TEMPERATURES,
        "top_p": None if _finite(s.top_p) and 0 < s.top_p <= 1 else "a number above 0, up to 1",
        "top_k": None if _whole(s.top_k) and 0 <= s.top_k < 1 << 63 else "a whole number, 0 or more",
        "stop": None if _are_texts(s.stop) else "a tuple of strings that can be written as UTF-8",
        "seed": None if s.seed is None or _whole(s.seed) else "a whole number or None",
        "constraint": None if s.constraint is None or isinstance(s.constraint, Constraint) else "a Constraint",
        "alternatives": None if _whole(s.alternatives) and s.alternatives >= 0 else "a whole number, 0 or more",
        "adapter": None if isinstance(s.adapter, str) else "a name",
    }
    for name, expected in faults.items():
        if expected:
            raise EngineError(f"cannot sample with {name}={getattr(s, name)!r}", expected=expected)


def require_temperature(temperature: float) -> None:
    """Raise :class:`EngineError` unless logits can be divided by ``temperature``; 0 counts as 1."""
    if not _is_temperature(temperature):
        raise EngineError(f"cannot score at temperature={temperature!r}", expected=TEMPERATURES)


TEMPERATURES = f"0, or a finite number from {LEAST_TEMPERATURE:g}"


def _is_temperature(value: object) -> bool:
    return _finite(value) and (value == 0 or value >= LEAST_TEMPERATURE)


def _whole(value: object) -> TypeGuard[int]:
    return isinstance(value, Integral)


def _finite(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and math.isfinite(value)


def _are_texts(value: object) -> bool:
    if not isinstance(value, tuple | list):
        return False
    try:
        return all(isinstance(s, str) and s.encode() is not None for s in cast("Sequence[object]", value))
    except UnicodeEncodeError:
        return False


def require_newer(version: Version, current: Version) -> None:
    """Raise :class:`EngineError` unless weights are newer than the ``current`` ones."""
    if version <= current:
        raise EngineError(f"weights {version} are not newer than {current}", expected="a higher version")


def require_next(version: Version, current: Version, fetched: Container[Version]) -> None:
    """Raise :class:`EngineError` for weights older than the ``current`` ones or not fetched."""
    if version < current:
        raise EngineError(f"weights {version} are older than {current}", expected="a higher version")
    if version not in fetched:
        raise EngineError(f"weights {version} were not fetched", hint="Call fetch with their manifest first.")
