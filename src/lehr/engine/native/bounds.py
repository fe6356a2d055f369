"""What a request may ask, and when it ends: alike in every engine that steps through requests."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lehr.core.trace import Sampling
from lehr.engine.base import EngineError, RequestTooLarge
from lehr.engine.native.request import Request
from lehr.engine.native.stops import extend_tail
from lehr.model.base import Tokenizer


def require_servable(
    prompt: Sequence[int], sampling: Sampling, *, room: int, vocab_size: int, tokenizer: Tokenizer | None
) -> None:
    """Raise :class:`RequestTooLarge` or :class:`EngineError` unless the request can be served.

    room: tokens that a prompt and its completion may have together.
    """
    longest = len(prompt) + sampling.max_tokens
    if longest > room:
        raise RequestTooLarge(
            f"{len(prompt)} prompt tokens and up to {sampling.max_tokens} new ones cannot fit",
            expected=f"at most {room} together",
            hint="Shorten the prompt, lower max_tokens or raise cache_tokens.",
        )
    if not prompt:
        raise EngineError("the prompt is empty", expected="at least one token")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise EngineError(
            f"token {min(prompt) if min(prompt) < 0 else max(prompt)} is outside the vocabulary",
            expected=f"ids from 0 to {vocab_size - 1}",
        )
    if sampling.max_tokens < 0 or sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or sampling.top_k < 0:
        raise EngineError(
            f"cannot sample with {sampling}", expected="temperature ≥ 0, 0 < top_p ≤ 1, top_k ≥ 0"
        )
    if any(sampling.stop) and tokenizer is None:
        raise EngineError("stop strings need a tokenizer, and this engine was built without one")


def has_ended(request: Request, stop_ids: Collection[int], tokenizer: Tokenizer | None) -> bool:
    """Whether the last token ends ``request``; if so, ``request.stop`` says why."""
    token, sampling = request.tokens[-1], request.sampling
    if token in stop_ids:
        request.stop = "eos"
    elif any(sampling.stop) and tokenizer is not None:
        stops = [s.encode() for s in sampling.stop if s]
        request.tail, hit = extend_tail(request.tail, tokenizer.token_bytes(token), stops)
        request.stop = "stop" if hit else None
    if request.stop is None and request.own >= sampling.max_tokens:
        request.stop = "length"
    return request.stop is not None
