"""Domain weights that follow pass rates: more for a domain below its target, less for one above it.

A pass rate is an exponentially weighted count of judged attempts, drawn towards the target by a few
imaginary ones, so that a domain without data is neutral. Attempts that could not be judged change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field

from lehr.core.config import Config


class SchedulerConfig(Config):
    """How shares follow pass rates."""

    target: float = Field(default=0.5, gt=0, lt=1)
    """Pass rate at which a domain is neither raised nor lowered."""
    targets: dict[str, float] = Field(default_factory=dict[str, float])
    """Targets of single domains."""
    strength: float = Field(default=2.0, ge=1)
    """Factor by which a domain at rate 0 or 1 (whichever is further) is raised or lowered."""
    floor: float = Field(default=0.25, ge=0, le=1)
    """Least share of a domain, as a fraction of an even share."""
    half_life: float = Field(default=128.0, gt=0)
    """Judged attempts after which an older one counts half."""
    prior_attempts: float = Field(default=8.0, gt=0)
    """Imaginary attempts at the target rate."""


@dataclass(slots=True)
class PassRate:
    """A decayed count of judged attempts. ``attempts`` and ``invalid`` count everything, undecayed."""

    passed: float = 0.0
    judged: float = 0.0
    attempts: int = 0
    invalid: int = 0

    def add(self, passed: int, judged: int, invalid: int, half_life: float) -> None:
        """Count the attempts of one group."""
        decay = 0.5 ** (judged / half_life)
        self.passed = self.passed * decay + passed
        self.judged = self.judged * decay + judged
        self.attempts += judged
        self.invalid += invalid

    def rate(self, prior: float, prior_attempts: float) -> float:
        """Return the pass rate, drawn towards ``prior``."""
        return (self.passed + prior * prior_attempts) / (self.judged + prior_attempts)


def multiplier(rate: float, target: float, strength: float) -> float:
    """Return the factor for a domain: ``strength ** ((target - rate) / max(target, 1 - target))``.

    1 at the target, ``strength`` at most, ``1 / strength`` at least; falls as the rate rises.
    """
    return strength ** ((target - rate) / max(target, 1.0 - target))


def with_floor(raw: Mapping[str, float], floor: float) -> dict[str, float]:
    """Return shares in proportion to ``raw`` (all positive), none below ``floor / len(raw)``; they sum to 1.

    What the floor gives to one domain is taken from those above it in proportion to their shares.
    """
    least = floor / len(raw)
    lifted: set[str] = set()
    while True:
        free = 1.0 - least * len(lifted)
        total = sum(value for name, value in raw.items() if name not in lifted)
        shares = {n: least if n in lifted else free * value / total for n, value in raw.items()}
        below = {n for n, share in shares.items() if n not in lifted and share < least}
        if not below:
            return shares
        lifted |= below
