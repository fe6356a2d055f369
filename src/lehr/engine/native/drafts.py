"""Drafts of what comes next, so that one step can yield several tokens (speculative decoding).

A draft is computed beside the token before it, and the sampler draws at every position as it always does,
with the random number of that position. While what was drawn is what was drafted, the next position counts
as well; the first one that differs ends the step. Tokens, log-probabilities and distribution are those of
plain sampling, whatever was drafted: only the number of steps changes. (Leviathan et al. 2023 accept with
probability min(1, p/q); for a draft that is certain, q = 1, that is the same probability.)

Drafts are looked up in the request's own text (Saxena 2023, "prompt lookup decoding"): what followed the
last few tokens the last time they occurred. Or a smaller model writes them: see ``draft_model``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

LONGEST, SHORTEST = 4, 2
"""Tokens whose earlier occurrence is looked for: the longest first."""
FIRST_WIDTH = 4
PATIENCE = 8
"""Tokens without a draft after one that was wrong from its first token."""


class DraftSource(Protocol):
    """Where the drafts of one request come from."""

    def draft(self, room: int) -> list[int]:
        """Return up to ``room`` tokens that may follow the request's; often none."""
        ...

    def learn(self, drafted: int, accepted: int) -> None:
        """Take note of how much of the last draft was accepted."""
        ...

    def close(self) -> None:
        """Free what is held for the request, which has ended."""
        ...


@dataclass(eq=False, slots=True)
class Width:
    """How many tokens are drafted at once: doubles while all of them are accepted, and falls with the first
    that is not, so that text that cannot be foreseen costs next to nothing.
    """

    most: int
    now: int = FIRST_WIDTH

    def learn(self, drafted: int, accepted: int) -> None:
        """Take note of how much of the last draft was accepted."""
        self.now = min(2 * self.now, self.most) if accepted == drafted else max(1, min(self.now, accepted + 1))


@dataclass(eq=False, slots=True)
class Drafter:
    """Looks drafts up in the request's text. ``tokens`` is the request's own list, which grows."""

    tokens: Sequence[int]
    width: Width
    _seen: int = 0
    _again: int = 0
    _after: dict[tuple[int, ...], int] = field(default_factory=dict[tuple[int, ...], int])

    def draft(self, room: int) -> list[int]:
        """Return up to ``room`` tokens that may follow ``tokens``; often none."""
        room = min(room, self.width.most, self.width.now)
        length = len(self.tokens)
        if room < 1 or length < self._again:
            return []
        self._read(length)
        start = self._find(length)
        if start is None:
            return []
        period = length - start  # an occurrence that reaches the end goes on by repeating itself
        return [self.tokens[start + i % period] for i in range(room)]

    def learn(self, drafted: int, accepted: int) -> None:
        """Take note of how much of the last draft was accepted."""
        self.width.learn(drafted, accepted)
        if accepted == 0:
            self._again = len(self.tokens) + PATIENCE

    def close(self) -> None:
        """Do nothing: a lookup holds nothing but its notes."""

    def _read(self, length: int) -> None:
        """Note what follows every run of tokens, but for the run that ends the text."""
        for end in range(max(self._seen, SHORTEST), length):
            for size in range(SHORTEST, min(LONGEST, end) + 1):
                self._after[tuple(self.tokens[end - size : end])] = end
        self._seen = length

    def _find(self, length: int) -> int | None:
        for size in range(min(LONGEST, length), SHORTEST - 1, -1):
            start = self._after.get(tuple(self.tokens[length - size : length]))
            if start is not None:
                return start
        return None
