"""Rewards are typed: a judged result is ``Valid``; anything else is ``Invalid`` and is never a zero."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

InvalidReason = Literal[
    "sandbox",  # the box died or could not be had
    "engine",  # the sampler failed
    "environment",  # the episode itself broke
    "verifier_timeout",  # the judge ran out of time
    "verifier_crash",  # the judge failed
    "not_finite",  # NaN or infinity
    "out_of_range",  # outside the range that the domain declares
    "cancelled",
]

Credit = Literal["value", "passed"]
"""What a gradient is taken from: the reward as it is, or 1 for a solved task and 0 for any other."""


@dataclass(frozen=True, slots=True)
class Valid:
    """A result that was judged.

    value: the reward, inside the range that the domain declares.
    parts: each term's own value before weighting, by name.
    turns: credit for single turns, where the environment gives it.
    passed: whether the task counts as solved (what pass rates count).
    """

    value: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    turns: tuple[float, ...] | None = None
    passed: bool = False

    def credit(self, kind: Credit) -> float:
        """Return the number that advantages are computed from."""
        return float(self.passed) if kind == "passed" else self.value


@dataclass(frozen=True, slots=True)
class Invalid:
    """A result that could not be judged: kept for diagnosis, never trained on, never averaged in."""

    reason: InvalidReason
    detail: str = ""


Reward = Valid | Invalid


def checked(value: float, low: float, high: float, *, parts: Mapping[str, float], passed: bool) -> Reward:
    """Return ``Valid`` if ``value`` is finite and inside ``[low, high]``, else ``Invalid`` with the reason."""
    if not math.isfinite(value):
        return Invalid("not_finite", f"the verifier returned {value}")
    if not low <= value <= high:
        return Invalid("out_of_range", f"the verifier returned {value}, declared range [{low}, {high}]")
    return Valid(value, dict(parts), None, passed)
