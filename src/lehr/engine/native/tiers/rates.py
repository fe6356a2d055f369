"""Whether loading is faster than computing, from what both took so far."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT = 0.3
"""Share of the newest measurement in the running mean."""
AGAIN = 16
"""Refusals after which a slow tier is tried once more: the machine may have been busy."""


@dataclass(slots=True)
class Rate:
    """A running mean of seconds per unit; None before the first measurement."""

    seconds: float | None = None

    def note(self, amount: float, seconds: float) -> None:
        """Take a measurement in."""
        if amount > 0:
            each = seconds / amount
            self.seconds = each if self.seconds is None else (1 - WEIGHT) * self.seconds + WEIGHT * each

    def time(self, amount: float) -> float | None:
        """Return the seconds that ``amount`` is expected to take."""
        return None if self.seconds is None else self.seconds * amount


class Choice:
    """Chooses between loading and computing. What was never measured is tried."""

    def __init__(self) -> None:
        self.compute = Rate()
        self.load = {"memory": Rate(), "disk": Rate()}
        self.chosen = self.refused = 0
        self._in_a_row = 0

    def loading_pays(self, tokens: int, tier_bytes: dict[str, int]) -> bool:
        """Return whether ``tokens`` are had sooner from the tiers, of each of which so many bytes are
        needed.
        """
        computing = self.compute.time(tokens)
        loading = self.expected_s(tier_bytes)
        pays = computing is None or loading <= computing or self._in_a_row >= AGAIN
        self._in_a_row = 0 if pays else self._in_a_row + 1
        self.chosen += pays
        self.refused += not pays
        return pays

    def expected_s(self, tier_bytes: dict[str, int]) -> float:
        """Return how long loading is expected to take; 0 for tiers that were not measured yet."""
        return sum(self.load[tier].time(count) or 0.0 for tier, count in tier_bytes.items())
