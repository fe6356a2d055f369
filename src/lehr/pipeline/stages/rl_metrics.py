"""What one step of reinforcement learning is told in numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lehr.core.reward import Valid
from lehr.core.trace import Version
from lehr.rollout.base import DropReason, Group


def group_metrics(
    stage: str, trained: Sequence[Group], finished: Sequence[Group], version: Version
) -> dict[str, float]:
    """Return rewards and pass rates over every group that finished since the last step (so that dropping
    the easy and the hopeless does not colour them), mean lengths by outcome, and the staleness of the attempts
    that were trained: mean, maximum, and the fraction of each age as ``staleness/AGE``.
    """
    values: dict[str, float] = {}
    rewards: dict[str, list[float]] = {}
    passes: dict[str, list[float]] = {}
    lengths: list[int] = []
    by_outcome: dict[bool, list[float]] = {True: [], False: []}
    invalid = 0
    for group in finished:
        for member in group.members:
            if isinstance(member.reward, Valid) and member.trace.failure is None:
                rewards.setdefault(group.domain, []).append(member.reward.value)
                passes.setdefault(group.domain, []).append(float(member.reward.passed))
                lengths.append(member.trace.usage.own_tokens)
                by_outcome[member.reward.passed].append(float(lengths[-1]))
            else:
                invalid += 1
    for name in rewards:
        values[f"{stage}/reward/{name}"] = _mean(rewards[name])
        values[f"{stage}/pass/{name}"] = _mean(passes[name])
    values[f"{stage}/reward"] = _mean([v for part in rewards.values() for v in part])
    values[f"{stage}/pass"] = _mean([v for part in passes.values() for v in part])
    values[f"{stage}/own_tokens"] = _mean([float(n) for n in lengths])
    for passed, name in ((True, "own_tokens_solved"), (False, "own_tokens_unsolved")):
        if by_outcome[passed]:
            values[f"{stage}/{name}"] = _mean(by_outcome[passed])
    values[f"{stage}/invalid"] = float(invalid)
    values[f"{stage}/groups_finished"] = float(len(finished))
    stale = [
        float(version.n - oldest.n)
        for group in trained
        for member in group.valid
        if (oldest := member.trace.oldest_version) is not None and oldest.incarnation == version.incarnation
    ]
    for age in sorted(set(stale)):
        values[f"{stage}/staleness/{age:.0f}"] = stale.count(age) / len(stale)
    values[f"{stage}/staleness"] = _mean(stale)
    values[f"{stage}/staleness_max"] = max(stale, default=0.0)
    return values


def dropped_metrics(stage: str, dropped: Mapping[tuple[DropReason, str], int]) -> dict[str, float]:
    """Return how many groups taught nothing since the last step, by reason, in all and by domain."""
    values: dict[str, float] = {}
    for reason in ("no_variance", "no_survivors"):
        values[f"{stage}/{reason}"] = float(sum(n for (why, _), n in dropped.items() if why == reason))
    return values | {f"{stage}/{reason}/{domain}": float(n) for (reason, domain), n in dropped.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
