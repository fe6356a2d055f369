"""What a request may ask and which weights may come next: alike in every engine."""

from __future__ import annotations

from collections.abc import Container, Sequence

from lehr.core.trace import Sampling, Version
from lehr.engine.base import EngineError, RequestTooLarge


def require_servable(
    prompt: Sequence[int], sampling: Sampling, *, room: int, vocab_size: int, knows_text: bool, widen: str
) -> None:
    """Raise :class:`RequestTooLarge` or :class:`EngineError` unless the request can be served.

    room: tokens that a prompt and its completion may have together. knows_text: whether stop strings can be
    found. widen: what gives more room, as an instruction.
    """
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
    if (
        sampling.max_tokens < 0
        or sampling.temperature < 0
        or not 0 < sampling.top_p <= 1
        or sampling.top_k < 0
        or sampling.alternatives < 0
    ):
        raise EngineError(
            f"cannot sample with {sampling}",
            expected="temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0, alternatives ≥ 0",
        )
    if any(sampling.stop) and not knows_text:
        raise EngineError("stop strings need a tokenizer, and this engine was built without one")


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
