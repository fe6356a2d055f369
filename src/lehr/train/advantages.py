"""Rewards to advantages: relative to the group, and by default not divided by the group's own spread.

Plain numbers in and out; no tensor library is loaded. Dividing by the spread of a group weights easy and
hard tasks up (Liu et al. 2025, "Understanding R1-Zero-like training", arXiv 2503.20783); a scale that moves
slowly per domain (:class:`RunningScale`) makes units comparable without that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lehr.core.reward import Reward, Valid
from lehr.train.base import Baseline


def group_advantages(rewards: Sequence[float], baseline: Baseline = "mean") -> NDArray[np.float64]:
    """Return ``r_i - mean(r)`` for the valid rewards of one group; with ``leave_one_out``, ``r_i`` minus the
    mean of the others, which is that times ``n / (n - 1)`` and without bias (Kool et al. 2019, "Buy 4 REINFORCE
    samples, get a baseline for free"; RLOO, Ahmadian et al. 2024, arXiv 2402.14740).

    Exactly 0 everywhere for a single member and where all rewards are equal (rounding of the mean
    must not look like a signal).
    """
    values = np.asarray(rewards, np.float64)
    count = len(values)
    if count < 2 or values.min() == values.max():
        return np.zeros(count)
    centred = values - values.mean()
    return centred * count / (count - 1) if baseline == "leave_one_out" else centred


def turn_returns(turns: Sequence[float], outcome: float, discount: float) -> NDArray[np.float64]:
    """Return for each turn the discounted sum of what it and later turns earned, ``outcome`` with the last
    (Sutton & Barto 2018, eq. 3.8).
    """
    found = np.asarray(turns, np.float64).copy()
    found[-1] += outcome
    for turn in range(len(found) - 2, -1, -1):
        found[turn] += discount * found[turn + 1]
    return found


def turn_advantages(
    returns: Sequence[NDArray[np.float64]], baseline: Baseline = "mean"
) -> list[NDArray[np.float64]]:
    """Return per member an advantage for each of its turns: its return relative to those of the members that
    got as far. A turn that one member alone reached has advantage 0. (In the manner of MT-GRPO, Zeng et al.
    2025, arXiv 2505.11821, which compares turns of equal index.)
    """
    found = [np.zeros(len(member)) for member in returns]
    for turn in range(max((len(member) for member in returns), default=0)):
        there = [number for number, member in enumerate(returns) if len(member) > turn]
        relative = group_advantages([float(returns[number][turn]) for number in there], baseline)
        for number, value in zip(there, relative, strict=True):
            found[number][turn] = value
    return found


def overlong_penalty(tokens: int, limit: int, margin: int) -> float:
    """Return what an attempt of ``tokens`` own tokens loses: 0 up to ``limit - margin``, then linearly more, 1
    from ``limit`` on (DAPO, Yu et al. 2025, arXiv 2503.14476, eq. 13).
    """
    return float(np.clip((tokens - (limit - margin)) / margin, 0.0, 1.0))


def spread(advantages: Sequence[float], ddof: int = 0) -> float:
    """Return the standard deviation about 0 of advantages that are centred, and 1.0 where they are all 0."""
    square = float(np.sum(np.square(np.asarray(advantages, np.float64))))
    return float(np.sqrt(square / max(1, len(advantages) - ddof))) if square > 0 else 1.0


@dataclass(frozen=True, slots=True)
class Scored:
    """One training sample with the reward of the trace that it was cut from."""

    group: str
    trace: str
    reward: Reward


def credit(scored: Sequence[Scored], *, scored_jointly: bool = False) -> list[float | None]:
    """Return an advantage per sample, None for one that must not be trained on.

    Groups are formed by id, in any order and of any size. A trace counts once in its group's mean however
    many samples were cut from it. An invalid reward is never a number: the trace is left out, and with
    ``scored_jointly`` (the verifier ranked the members against each other) the whole group is.
    """
    traces: dict[str, dict[str, Reward]] = {}
    for sample in scored:
        traces.setdefault(sample.group, {}).setdefault(sample.trace, sample.reward)
    found: dict[tuple[str, str], float] = {}
    for group, members in traces.items():
        valid = {trace: reward.value for trace, reward in members.items() if isinstance(reward, Valid)}
        if scored_jointly and len(valid) < len(members):
            continue
        for trace, advantage in zip(valid, group_advantages(list(valid.values())), strict=True):
            found[group, trace] = float(advantage)
    return [found.get((sample.group, sample.trace)) for sample in scored]


def normalised_sum(
    parts: Sequence[Mapping[str, float]], weights: Mapping[str, float] | None = None
) -> NDArray[np.float64]:
    """Return one advantage per member: each reward part is centred and divided by its own spread over the
    group before the weighted sum, so that a part with large units does not drown the others. A part without
    spread gives 0 (Liu et al. 2026, GDPO, arXiv 2601.05242).
    """
    total = np.zeros(len(parts))
    for name in sorted({name for part in parts for name in part}):
        centred = group_advantages([part.get(name, 0.0) for part in parts])
        spread = float(np.sqrt(np.mean(centred**2)))
        if spread > 0:
            total += (weights or {}).get(name, 1.0) * centred / spread
    return total


class RunningScale:
    """The typical size of a domain's advantages, to divide them by.

    An exponential moving average of their mean square, bias-corrected, with a floor relative to the largest
    value seen: a domain whose rewards hardly differ any more is not blown up into noise. Multiplying all
    rewards of a domain by a constant changes nothing downstream. Groups without variance are not counted.
    """

    def __init__(self, decay: float = 0.98, floor: float = 0.1) -> None:
        self.decay = decay
        self.floor = floor
        self._square = 0.0
        self._mass = 0.0
        self._peak = 0.0

    def update(self, advantages: Sequence[float]) -> None:
        """Take in the advantages of one group."""
        square = float(np.mean(np.square(np.asarray(advantages, np.float64)))) if len(advantages) else 0.0
        if square == 0.0:
            return
        self._square = self.decay * self._square + (1 - self.decay) * square
        self._mass = self.decay * self._mass + (1 - self.decay)
        self._peak = max(self._peak, self._square / self._mass)

    @property
    def value(self) -> float:
        """The scale, 1.0 before the first group with variance. Never 0."""
        if self._mass == 0.0:
            return 1.0
        return float(np.sqrt(max(self._square / self._mass, self.floor**2 * self._peak)))

    def state(self) -> dict[str, float]:
        """Return JSON-serialisable state."""
        return {
            "decay": self.decay,
            "floor": self.floor,
            "square": self._square,
            "mass": self._mass,
            "peak": self._peak,
        }

    @classmethod
    def restore(cls, state: Mapping[str, float]) -> RunningScale:
        """Rebuild from :meth:`state`."""
        scale = cls(state["decay"], state["floor"])
        scale._square, scale._mass, scale._peak = state["square"], state["mass"], state["peak"]
        return scale
