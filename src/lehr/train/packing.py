"""Samples to micro-batches without padding, with a shared prompt laid out once.

Samples of one prefix key form a tree: ``[common prompt | rest of member 1 | rest of member 2 | ...]``. Each
rest sees the prompt and, causally, itself. The common part ends before the first own token of any member,
so nothing that is trained on is shared. What no loss token depends on (everything from the last own token
of a sample on) is not computed at all. Samples of one pair end up in one micro-batch, whatever its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lehr.core.batch import Sample
from lehr.core.errors import ConfigError

OPTIONAL = ("reference", "proximal", "values", "returns")
"""Arrays of a sample that not every loss needs: all samples of a batch carry one, or none does."""
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
    reference, proximal, values, returns: of the loss token, None where the samples do not carry them.
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
    reference: NDArray[np.float32] | None = None
    proximal: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class _Member:
    index: int
    sample: Sample
    length: int
    """Tokens that some loss token depends on."""


@dataclass(frozen=True, slots=True)
class _Family:
    number: int
    shared: int
    members: list[_Member]


def pack(samples: Sequence[Sample], tokens_per_microbatch: int, *, share: bool = True) -> list[Microbatch]:
    """Return micro-batches of about equal size that hold every sample with an own token once.

    A sample longer than ``tokens_per_microbatch`` gets a micro-batch to itself, and so does a pair. With
    ``share`` off nothing is laid out as a tree. Raises :class:`ConfigError` for a sample that does not fit its
    own description.
    """
    families = _families(samples, share)
    total = sum(f.shared + sum(m.length - f.shared for m in f.members) for f in families)
    if total == 0:
        return []
    target = min(tokens_per_microbatch, -(-total // -(-total // tokens_per_microbatch)) + 64)
    packed: list[Microbatch] = []
    builder = _Builder()
    for unit in _units(families):
        if builder.size and builder.size + builder.cost(unit) > target:
            packed.append(builder.build())
            builder = _Builder()
        for family, member in unit:
            builder.add(family, member)
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
        families.append(_Family(len(families), shared if shared >= MIN_SHARED_TOKENS else 0, members))
    return families


def _units(families: Sequence[_Family]) -> list[list[tuple[_Family, _Member]]]:
    """Return what must not be split: the samples of one pair, and every other sample alone."""
    units: dict[str, list[tuple[_Family, _Member]]] = {}
    for family in families:
        for member in family.members:
            units.setdefault(member.sample.pair or f"\0{member.index}", []).append((family, member))
    return list(units.values())


def _check(index: int, sample: Sample) -> None:
    arrays = (sample.tokens, sample.own, sample.logprobs, sample.advantages)
    lengths = {
        len(array) for array in (*arrays, *(getattr(sample, name) for name in OPTIONAL)) if array is not None
    }
    if len(lengths) != 1:
        raise ConfigError(f"arrays of sample {index} have lengths {sorted(lengths)}", expected="equal lengths")
    if len(sample.own) and sample.own[0]:
        raise ConfigError(
            f"the first token of sample {index} is marked own", expected="something that it was sampled from"
        )


@dataclass(slots=True)
class _Builder:
    size: int = 0
    contexts: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    tokens: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])
    positions: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    spans: list[Span] = field(default_factory=list[Span])
    rows: list[NDArray[np.int64]] = field(default_factory=list[NDArray[np.int64]])
    losses: list[tuple[_Member, NDArray[np.int64]]] = field(
        default_factory=list[tuple[_Member, NDArray[np.int64]]]
    )

    def cost(self, unit: Sequence[tuple[_Family, _Member]]) -> int:
        """Return how many rows more the members need here."""
        fresh = {family.number: family.shared for family, _ in unit if family.number not in self.contexts}
        return sum(member.length - family.shared for family, member in unit) + sum(fresh.values())

    def add(self, family: _Family, member: _Member) -> None:
        """Lay out a member, and before it what its family shares, where that is not there yet."""
        if family.shared and family.number not in self.contexts:
            self.contexts[family.number] = self.add_context(member, family.shared)
        self.add_member(member, family.shared, self.contexts.get(family.number))

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
            **{name: self._gather(name) for name in OPTIONAL},
        )

    def _gather(self, name: str) -> NDArray[np.float32] | None:
        found = [(getattr(member.sample, name), own) for member, own in self.losses]
        there = [array[own] for array, own in found if array is not None]
        if there and len(there) < len(found):
            raise ConfigError(
                f"{len(found) - len(there)} of {len(found)} samples lack {name}",
                expected="that all samples of a batch carry it, or none",
            )
        return np.concatenate(there).astype(np.float32) if there else None
