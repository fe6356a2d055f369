"""What one step of reinforcement learning is told in numbers."""

from __future__ import annotations

from collections.abc import Sequence

from lehr.core.reward import Valid
from lehr.core.trace import Version
from lehr.rollout.base import Group


def group_metrics(
    stage: str, trained: Sequence[Group], finished: Sequence[Group], version: Version
) -> dict[str, float]:
    """Return rewards and pass rates over every group that finished since the last step (so that dropping
    the easy and the hopeless does not colour them), and the staleness of those that were trained.
    """
    values: dict[str, float] = {}
    rewards: dict[str, list[float]] = {}
    passes: dict[str, list[float]] = {}
    lengths: list[int] = []
    invalid = 0
    for group in finished:
        for member in group.members:
            if isinstance(member.reward, Valid) and member.trace.failure is None:
                rewards.setdefault(group.domain, []).append(member.reward.value)
                passes.setdefault(group.domain, []).append(float(member.reward.passed))
                lengths.append(member.trace.usage.own_tokens)
            else:
                invalid += 1
    for name in rewards:
        values[f"{stage}/reward/{name}"] = _mean(rewards[name])
        values[f"{stage}/pass/{name}"] = _mean(passes[name])
    values[f"{stage}/reward"] = _mean([v for part in rewards.values() for v in part])
    values[f"{stage}/pass"] = _mean([v for part in passes.values() for v in part])
    values[f"{stage}/own_tokens"] = _mean([float(n) for n in lengths])
    values[f"{stage}/invalid"] = float(invalid)
    values[f"{stage}/groups_finished"] = float(len(finished))
    stale = [
        float(version.n - oldest.n)
        for group in trained
        for member in group.valid
        if (oldest := member.trace.oldest_version) is not None and oldest.incarnation == version.incarnation
    ]
    values[f"{stage}/staleness"] = _mean(stale)
    values[f"{stage}/staleness_max"] = max(stale, default=0.0)
    return values


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
