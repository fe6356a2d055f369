"""When a request ends: alike in every engine that steps through requests."""

from __future__ import annotations

from collections.abc import Collection

from lehr.engine.native.request import Request
from lehr.engine.native.stops import extend_tail
from lehr.model.base import Tokenizer


def has_ended(request: Request, stop_ids: Collection[int], tokenizer: Tokenizer | None) -> bool:
    """Whether the last token ends ``request``; if so, ``request.stop`` says why."""
    token, sampling = request.tokens[-1], request.sampling
    if token in stop_ids:
        request.stop = "eos"
    elif any(sampling.stop) and tokenizer is not None:
        stops = [s.encode() for s in sampling.stop if s]
        request.tail, hit = extend_tail(request.tail, tokenizer.token_bytes(token), stops)
        request.stop = "stop" if hit else None
    if request.stop is None and request.guide is not None and not stop_ids:
        request.guide.follow(request.tokens, request.prompt_length)
        request.stop = "stop" if request.guide.complete else None
    if request.stop is None and request.own >= sampling.max_tokens:
        request.stop = "length"
    return request.stop is not None
