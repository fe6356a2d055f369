"""Groups to training samples: group-relative advantages on one scale per domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lehr.core.batch import Sample
from lehr.core.reward import Credit, Valid
from lehr.rollout.base import Group
from lehr.train.advantages import RunningScale, group_advantages


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


def to_samples(
    groups: Sequence[Group], scales: DomainScales, credit: Credit = "value", negative_weight: float = 1.0
) -> tuple[Sample, ...]:
    """Return a sample per segment of every valid member. A trace split into several segments counts once
    in its group's baseline; invalid members count nowhere. Advantages below zero are multiplied by
    ``negative_weight`` after their scale was taken; at 0 such members are left out altogether.
    """
    samples: list[Sample] = []
    for group in groups:
        valid = group.valid
        rewards = [m.reward.credit(credit) for m in valid if isinstance(m.reward, Valid)]
        advantages = group_advantages(rewards)
        scale = scales.observe(group.domain, [float(a) for a in advantages])
        for member, advantage in zip(valid, advantages, strict=True):
            if advantage < 0:
                if negative_weight == 0:
                    continue
                advantage *= negative_weight
            for segment in member.trace.segments:
                if not segment.own.any():
                    continue
                samples.append(
                    Sample(
                        tokens=segment.tokens,
                        own=segment.own,
                        logprobs=segment.raw_logprobs,  # what the trainer can recompute: before top-k and top-p
                        advantages=np.where(segment.own, np.float32(advantage / scale), np.float32(0)),
                        temperature=segment.sampling.temperature,
                        prefix=group.id,
                        trace_id=member.trace.id,
                        domain=group.domain,
                    )
                )
    return tuple(samples)
