"""Rates and time left, as pure arithmetic on a clock."""

from __future__ import annotations

from lehr.core.clock import Clock, SystemClock

_SETTLE_S = 0.05


class Meter:
    """Follows one piece of work. What is reported at once, when it begins, was done before (a resumed stage):
    it counts as done and not towards the rate.
    """

    def __init__(self, total: int | None, clock: Clock | None = None) -> None:
        self.total = total
        self.done = 0
        self._clock = clock or SystemClock()
        self._start = self._clock.now()
        self._before = 0
        self._moved_at = self._start

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock.now() - self._start

    def update(self, done: int, total: int | None = None) -> None:
        """Take in that ``done`` units are finished."""
        if total is not None:
            self.total = total
        if done != self.done:
            self._moved_at = self._clock.now()
        if self.done == 0 and self.elapsed_s < _SETTLE_S:
            self._before = done
        self.done = done

    @property
    def rate(self) -> float | None:
        """Units per second up to the last unit that was finished, or None before the first."""
        fresh, seconds = self.done - self._before, self._moved_at - self._start
        return fresh / seconds if fresh > 0 and seconds > 0 else None

    @property
    def left_s(self) -> float | None:
        """Expected seconds until the end, or None where that cannot be known."""
        if self.total is None or self.rate is None:
            return None
        since_moved = self._clock.now() - self._moved_at
        return max(0.0, (self.total - self.done) / self.rate - since_moved)

    @property
    def fraction(self) -> float | None:
        """Share that is done, in [0, 1]."""
        return min(1.0, self.done / self.total) if self.total else None


def duration(seconds: float) -> str:
    """Return ``12 s``, ``3:05`` or ``2:03:05``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def pace(rate: float, unit: str) -> str:
    """Return ``4.2 tasks/s``, or ``12 s per step`` for slow work."""
    if unit == "s":
        return ""
    if rate >= 0.5:
        return f"{rate:.1f} {unit}/s" if rate < 100 else f"{rate:.0f} {unit}/s"
    return f"{1 / rate:.0f} s per {unit.removesuffix('s')}"
