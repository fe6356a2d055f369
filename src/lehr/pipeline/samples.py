"""Groups to training samples: what each attempt, or each of its turns, is credited with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lehr.core.batch import Sample
from lehr.core.errors import ConfigError
from lehr.core.reward import Credit, Valid
from lehr.core.trace import Segment, Trace
from lehr.rollout.base import DropReason, Group
from lehr.train.advantages import (
    RunningScale,
    group_advantages,
    normalised_sum,
    overlong_penalty,
    spread,
    turn_advantages,
    turn_returns,
)
from lehr.train.base import AdvantageConfig

FLAT = 1e-6
"""Advantages of a group that are all smaller come from rounding."""


@dataclass
class DomainScales:
    """One running scale of reward spread per domain, so that no domain's units drown another's."""

    scales: dict[str, RunningScale]

    @classmethod
    def restore(cls, state: Mapping[str, Mapping[str, float]]) -> DomainScales:
        """Rebuild from :meth:`state`."""
        return cls({name: RunningScale.restore(value) for name, value in state.items()})

    def state(self) -> dict[str, dict[str, float]]:
        """Return JSON-serialisable state."""
        return {name: scale.state() for name, scale in self.scales.items()}

    def observe(self, domain: str, advantages: Sequence[float]) -> float:
        """Take in a group's advantages and return the scale to divide them by."""
        scale = self.scales.setdefault(domain, RunningScale())
        scale.update(advantages)
        return scale.value


@dataclass(frozen=True, slots=True)
class Crediting:
    """How a stage turns rewards into advantages; the fields of ``RlStage`` of the same names."""

    credit: Credit = "value"
    negative_weight: float = 1.0
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    reward_kl: float = 0.0


def cut(groups: Sequence[Group]) -> tuple[Sample, ...]:
    """Return a sample, without advantages yet, per segment with own tokens of every valid member, in order."""
    return tuple(
        Sample(
            tokens=segment.tokens,
            own=segment.own,
            logprobs=segment.raw_logprobs,  # what the trainer can recompute: before top-k and top-p
            advantages=np.zeros(len(segment), np.float32),
            temperature=segment.sampling.temperature,
            prefix=group.id,
            trace_id=member.trace.id,
            domain=group.domain,
        )
        for group in groups
        for member in group.valid
        for segment in member.trace.segments
        if segment.own.any()
    )


def to_samples(
    groups: Sequence[Group],
    scales: DomainScales,
    rule: Crediting | None = None,
    samples: Sequence[Sample] | None = None,
) -> tuple[Sample, ...]:
    """Return what :func:`cut` returns (given as ``samples`` where it has been scored meanwhile) with
    advantages.

    A trace split into several segments counts once in its group's baseline; invalid members count nowhere.
    Advantages below zero are multiplied by ``negative_weight`` after their scale was taken; at 0 such members
    are left out altogether, and so are overlong ones that are masked.
    """
    rule = rule or Crediting()
    bare = iter(cut(groups) if samples is None else samples)
    taken = [[[next(bare) for s in m.trace.segments if s.own.any()] for m in g.valid] for g in groups]
    raw = [
        group_credit(g, rule, [_divergence(s, rule.reward_kl) for s in cuts])
        for g, cuts in zip(groups, taken, strict=True)
    ]
    whole = [float(a) for group in raw for member in group for a in member]
    found: list[Sample] = []
    for group, cuts, advantages in zip(groups, taken, raw, strict=True):
        flat = [float(a) for member in advantages for a in member]
        match rule.advantage.scale:
            case "domain":
                scale = scales.observe(group.domain, flat)
            case "batch":
                scale = spread(whole)
            case "group":
                scale = spread(flat, ddof=1)
            case "none":
                scale = 1.0
        for member, parts, values in zip(group.valid, cuts, advantages, strict=True):
            masked = rule.advantage.overlong == "mask" and is_overlong(member.trace, rule.advantage)
            if masked or (rule.negative_weight == 0 and (values < 0).all()):
                continue
            weighed = np.where(values < 0, values * rule.negative_weight, values) / scale
            segments = [segment for segment in member.trace.segments if segment.own.any()]
            for sample, tokens in zip(parts, _spread_over(segments, weighed), strict=True):
                found.append(replace(sample, advantages=tokens))
    return tuple(found)


def group_credit(
    group: Group, rule: Crediting, penalties: Sequence[float] | None = None
) -> list[NDArray[np.float64]]:
    """Return per valid member its advantages before any scale: one for all its tokens, or one per turn.

    penalties: what is taken off each reward besides the penalty on length.
    """
    config = rule.advantage
    valid = group.valid
    rewards = [m.reward for m in valid if isinstance(m.reward, Valid)]
    off = [
        penalty + _overlong_cost(member.trace, config)
        for member, penalty in zip(valid, penalties or [0.0] * len(valid), strict=True)
    ]
    if config.normalise_parts:
        parts = [dict(r.parts) or {"value": r.value} for r in rewards]
        total = normalised_sum(parts, config.part_weights)
        total += group_advantages([-o for o in off], config.baseline)
        return [np.asarray([value]) for value in total]
    values = [reward.credit(rule.credit) - o for reward, o in zip(rewards, off, strict=True)]
    if config.turns == "return" and rewards and all(r.turns for r in rewards):
        returns = [
            turn_returns(_padded(reward.turns or (), member.trace), value, config.turn_discount)
            for reward, member, value in zip(rewards, valid, values, strict=True)
        ]
        return turn_advantages(returns, config.baseline)
    return [np.asarray([value]) for value in group_advantages(values, config.baseline)]


def teaches(group: Group, rule: Crediting) -> DropReason | None:
    """Return None if the group has something to learn from, else the reason why it is dropped.

    Decided before any divergence is taken off a reward: a group without variance teaches nothing, that
    included.
    """
    if len(group.valid) < 2:
        return "no_survivors"
    flat = all(float(np.abs(a).max()) < FLAT for a in group_credit(group, rule))
    return "no_variance" if flat else None


def is_overlong(trace: Trace, config: AdvantageConfig) -> bool:
    """Return whether the token limit cut the attempt off, or it has more than ``overlong_tokens`` tokens."""
    limit = config.overlong_tokens
    return trace.stop == "length" or (limit is not None and _own_tokens(trace) > limit)


def _overlong_cost(trace: Trace, config: AdvantageConfig) -> float:
    if config.overlong != "penalise" or config.overlong_tokens is None:
        return 0.0
    tokens = _own_tokens(trace)
    return config.overlong_penalty * overlong_penalty(tokens, config.overlong_tokens, config.overlong_margin)


def _own_tokens(trace: Trace) -> int:
    return sum(int(segment.own.sum()) for segment in trace.segments)


def _divergence(samples: Sequence[Sample], weight: float) -> float:
    """Return ``weight`` times the k1 estimate of the divergence from the reference, summed over an attempt."""
    if weight == 0:
        return 0.0
    total = 0.0
    for sample in samples:
        if sample.reference is None:
            raise ConfigError("reward_kl needs samples that were scored under the reference model")
        total += float((sample.logprobs - sample.reference)[sample.own].sum(dtype=np.float64))
    return weight * total


def _padded(turns: Sequence[float], trace: Trace) -> list[float]:
    """Return credit for every turn of the trace: 0 for turns after the last that the environment credited."""
    count = sum(len(segment.turns) for segment in trace.segments if segment.own.any())
    if len(turns) > count:
        raise ConfigError(
            f"the reward of trace {trace.id} credits {len(turns)} turns", expected=f"at most its {count} turns"
        )
    return [*turns, *[0.0] * (count - len(turns))]


def _spread_over(segments: Sequence[Segment], values: NDArray[np.float64]) -> list[NDArray[np.float32]]:
    """Return float32 ``[T]`` per segment: each own token has its turn's advantage, the turns counted on from
    segment to segment; a single value is that of all tokens.
    """
    found: list[NDArray[np.float32]] = []
    before = 0
    for segment in segments:
        if len(values) == 1:
            tokens = np.full(len(segment), values[0])
        else:
            turn = np.searchsorted(segment.turns, np.arange(len(segment)), side="right") - 1
            tokens = values[np.clip(before + turn, 0, len(values) - 1)]
        found.append(np.where(segment.own, tokens, 0).astype(np.float32))
        before += len(segment.turns)
    return found
