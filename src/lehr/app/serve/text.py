"""Tokens to text as they come: whole characters only, and nothing that may still become a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from lehr.engine.base import Ranked
from lehr.engine.native.stops import find_stop

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class Bytes(Protocol):
    """What text is made with."""

    specials: dict[str, int]

    def token_bytes(self, token: int) -> bytes:
        """Return the raw bytes of one token, b"" for a special one."""
        ...


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of the text with its log-probability. ``offset``: whole characters before it. ``others``: the
    likeliest tokens in its place, where they were asked for.
    """

    token: int
    text: str
    data: bytes
    logprob: float
    offset: int
    others: tuple[Scored, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that is final, and the tokens that begin in it."""

    text: str = ""
    tokens: tuple[Scored, ...] = ()


class TextStream:
    """Turns one completion into text. Its pieces, joined, are the text up to the leftmost stop string."""

    def __init__(self, tokenizer: Bytes, stops: Sequence[str], stop_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._names = {i: name for name, i in tokenizer.specials.items()}
        self._stops = [s.encode() for s in stops if s]
        self._stop_ids = frozenset(stop_ids)
        self._held = b""
        self._pending: list[tuple[int, Scored]] = []
        self._seen = self._released = self._characters = 0
        self._decoder, self._counter = (codecs.getincrementaldecoder("utf-8")("replace") for _ in range(2))
        self._over = False

    def add(
        self, tokens: Sequence[int], logprobs: Sequence[float], alternatives: Sequence[Ranked] = ()
    ) -> Piece:
        """Return what became final with these tokens."""
        ranked = alternatives or [()] * len(tokens)
        for token, logprob, others in zip(tokens, logprobs, ranked, strict=True):
            if not self._over and token not in self._stop_ids:
                self._take(token, logprob, others)
        if self._over:
            return Piece()
        found = find_stop(self._held, self._stops)
        if found is not None:
            piece = self._release(found[0], final=True)
            self._over = True
            return piece
        return self._release(len(self._held) - self._unsure())

    def end(self) -> Piece:
        """Return what was held back, once no token follows."""
        if self._over:
            return Piece()
        self._over = True
        return self._release(len(self._held), final=True)

    def _take(self, token: int, logprob: float, others: Ranked) -> None:
        ranked = tuple(self._scored(other, value) for other, value in others)
        scored = self._scored(token, logprob, ranked)
        data = scored.data
        self._pending.append((self._seen, scored))
        self._characters += len(self._counter.decode(data))
        self._seen += len(data)
        self._held += data

    def _scored(self, token: int, logprob: float, others: tuple[Scored, ...] = ()) -> Scored:
        data = self._tokenizer.token_bytes(token)
        name = data.decode(errors="replace") if data else self._names.get(token, "")
        return Scored(token, name, data, max(logprob, LEAST_LOGPROB), self._characters, others)

    def _unsure(self) -> int:
        """Return how many of the last bytes held may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1)
        for size in range(min(len(self._held), longest - 1), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0

    def _release(self, count: int, *, final: bool = False) -> Piece:
        text = self._decoder.decode(self._held[:count], final)
        self._held = self._held[count:]
        self._released += count
        ready = 0
        for start, scored in self._pending:
            if start + bool(scored.data) > self._released:
                break
            ready += 1
        tokens = tuple(scored for _, scored in self._pending[:ready])
        del self._pending[:ready]
        return Piece(text, tokens)
