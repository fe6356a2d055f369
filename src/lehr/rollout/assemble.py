"""Builds a segment while an episode runs: prompt tokens and completions are appended, never re-encoded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import get_args

import numpy as np

from lehr.core.trace import Completion, KvPolicy, Sampling, Segment

_POLICIES: tuple[KvPolicy, ...] = get_args(KvPolicy)


class SegmentBuilder:
    """Grows one segment over the turns of an episode.

    ``tokens`` is the sequence so far; it is what is sent to the engine for the next completion.
    """

    def __init__(self, sampling: Sampling) -> None:
        self.tokens: list[int] = []
        self._sampling = sampling
        self._completions: list[tuple[int, Completion]] = []

    def extend_to(self, tokens: Sequence[int]) -> None:
        """Take over ``tokens``, which must begin with what is already here."""
        if list(tokens[: len(self.tokens)]) != self.tokens:
            raise ValueError("a rendered chat must extend the tokens that were sampled, not replace them")
        self.tokens = list(tokens)

    def append(self, completion: Completion) -> None:
        """Add a completion's own tokens."""
        self._completions.append((len(self.tokens), completion))
        self.tokens.extend(int(t) for t in completion.tokens)

    def build(self) -> Segment:
        """Return the segment of everything appended so far."""
        length = len(self.tokens)
        own = np.zeros(length, np.bool_)
        logprobs = np.zeros(length, np.float32)
        raw = np.zeros(length, np.float32)
        mass = np.ones(length, np.float32)
        versions = np.full(length, -1, np.int64)
        for start, completion in self._completions:
            span = slice(start, start + len(completion.tokens))
            own[span] = True
            logprobs[span] = completion.logprobs
            raw[span] = completion.raw_logprobs
            mass[span] = completion.kept_mass
            versions[span] = completion.versions
        return Segment(
            tokens=np.asarray(self.tokens, np.int32),
            own=own,
            logprobs=logprobs,
            raw_logprobs=raw,
            kept_mass=mass,
            versions=versions,
            turns=np.asarray([start for start, _ in self._completions], np.int32),
            sampling=self._sampling,
            kv_policy=_least_exact(completion.kv_policy for _, completion in self._completions),
        )


def _least_exact(policies: Iterable[KvPolicy]) -> KvPolicy:
    return max((_POLICIES[0], *policies), key=_POLICIES.index)
