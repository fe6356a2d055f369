"""Samples to micro-batches without padding, with a shared prompt laid out once.

Samples of one prefix key form a tree: ``[common prompt | rest of member 1 | rest of member 2 | ...]``. Each
rest sees the prompt and, causally, itself. The common part ends before the first own token of any member,
so nothing that is trained on is shared. What no loss token depends on (everything from the last own token
of a sample on) is not computed at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lehr.core.batch import Sample
from lehr.core.errors import ConfigError

MIN_SHARED_TOKENS = 8
"""A shorter common prefix is not worth a tree."""


@dataclass(frozen=True, slots=True)
class Span:
    """Packed rows ``[start, stop)`` that see themselves causally, and all of ``context`` rows."""

    start: int
    stop: int
    context: tuple[int, int] | None = None

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward and backward. Row arrays have one entry per packed token, loss arrays one per loss token.

    rows: the packed row whose hidden state predicts the loss token (several may name the same shared row).
    samples: index of the sample in the batch. targets, temperatures, sampled, advantages: of the loss token.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    spans: tuple[Span, ...]
    rows: NDArray[np.int64]
    samples: NDArray[np.int64]
    targets: NDArray[np.int64]
    temperatures: NDArray[np.float32]
    sampled: NDArray[np.float32]
    advantages: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Member:
    index: int
    sample: Sample
    length: int
    """Tokens that some loss token depends on."""


@dataclass(frozen=True, slots=True)
class _Family:
    shared: int
    members: list[_Member]


def pack(samples: Sequence[Sample], tokens_per_microbatch: int, *, share: bool = True) -> list[Microbatch]:
    """Return micro-batches of about equal size that hold every sample with an own token once.

    A sample longer than ``tokens_per_microbatch`` gets a micro-batch to itself. With ``share`` off nothing
    is laid out as a tree. Raises :class:`ConfigError` for a sample that does not fit its own description.
    """
    families = _families(samples, share)
    total = sum(f.shared + sum(m.length - f.shared for m in f.members) for f in families)
    if total == 0:
        return []
    target = min(tokens_per_microbatch, -(-total // -(-total // tokens_per_microbatch)) + 64)
    packed: list[Microbatch] = []
    builder = _Builder()
    for family in families:
        context: tuple[int, int] | None = None
        for member in family.members:
            cost = member.length - family.shared + (family.shared if context is None else 0)
            if builder.size and builder.size + cost > target:
                packed.append(builder.build())
                builder, context = _Builder(), None
            if family.shared and context is None:
                context = builder.add_context(member, family.shared)
            builder.add_member(member, family.shared, context)
    packed.append(builder.build())
    return packed


def common_prefix(samples: Sequence[Sample]) -> int:
    """Return how many first tokens all samples share, cut before the first own token of any."""
    first = samples[0].tokens
    shared = min(int(np.argmax(s.own)) for s in samples)
    for sample in samples[1:]:
        length = min(shared, len(sample.tokens))
        differs = np.flatnonzero(first[:length] != sample.tokens[:length])
        shared = int(differs[0]) if len(differs) else length
    return shared


def _families(samples: Sequence[Sample], share: bool) -> list[_Family]:
    keyed: dict[str, list[_Member]] = {}
    for index, sample in enumerate(samples):
        _check(index, sample)
        if not sample.own.any():
            continue
        length = int(np.flatnonzero(sample.own)[-1])
        key = sample.prefix if share and sample.prefix else f"\0{index}"
        keyed.setdefault(key, []).append(_Member(index, sample, length))
    families: list[_Family] = []
    for members in keyed.values():
        shared = common_prefix([m.sample for m in members]) if len(members) > 1 else 0
        families.append(_Family(shared if shared >= MIN_SHARED_TOKENS else 0, members))
    return families


def _check(index: int, sample: Sample) -> None:
    lengths = {len(sample.tokens), len(sample.own), len(sample.logprobs), len(sample.advantages)}
    if len(lengths) != 1:
        raise ConfigError(f"arrays of sample {index} have lengths {sorted(lengths)}", expected="equal lengths")
    if len(sample.own) and sample.own[0]:
        raise ConfigError(
            f"the first token of sample {index} is marked own", expected="something that it was sampled from"
        )


@dataclass(slots=True)
class _Builder:
    size: int = 0
    tokens: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])
    positions: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    spans: list[Span] = field(default_factory=list[Span])
    rows: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    losses: list[tuple[_Member, NDArray[np.int64]]] = field(
        default_factory=list[tuple[_Member, NDArray[np.int64]]]
    )

    def add_context(self, member: _Member, shared: int) -> tuple[int, int]:
        start = self._add_rows(member.sample, 0, shared)
        self.spans.append(Span(start, self.size))
        return start, self.size

    def add_member(self, member: _Member, shared: int, context: tuple[int, int] | None) -> None:
        own = np.flatnonzero(member.sample.own)
        start = self._add_rows(member.sample, shared, member.length)
        if self.size > start:
            self.spans.append(Span(start, self.size, context))
        before = own - 1
        rows = before - shared + start
        if context is not None:
            rows = np.where(before < shared, before + context[0], rows)
        self.rows.append(rows)
        self.losses.append((member, own))

    def _add_rows(self, sample: Sample, first: int, last: int) -> int:
        start = self.size
        self.tokens.append(sample.tokens[first:last])
        self.positions.append(np.arange(first, last))
        self.size += last - first
        return start

    def build(self) -> Microbatch:
        losses = self.losses
        return Microbatch(
            tokens=np.concatenate(self.tokens).astype(np.int64),
            positions=np.concatenate(self.positions),
            spans=tuple(self.spans),
            rows=np.concatenate(self.rows),
            samples=np.concatenate([np.full(len(own), m.index, np.int64) for m, own in losses]),
            targets=np.concatenate([m.sample.tokens[own] for m, own in losses]).astype(np.int64),
            temperatures=np.concatenate(
                [np.full(len(own), m.sample.temperature or 1.0, np.float32) for m, own in losses]
            ),
            sampled=np.concatenate([m.sample.logprobs[own] for m, own in losses]).astype(np.float32),
            advantages=np.concatenate([m.sample.advantages[own] for m, own in losses]).astype(np.float32),
        )
