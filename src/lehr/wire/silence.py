"""Notices that the other side has said nothing for too long."""

from __future__ import annotations

from lehr.core.clock import Clock, SystemClock


class Silence:
    """Counts the time since the last sign of life, as often as :meth:`tick` is called.

    A stretch in which this process itself did not run (stopped by a terminal, swapped out) counts as one
    ``stride_s`` at most: it says nothing about the other side.
    """

    def __init__(self, limit_s: float, stride_s: float, clock: Clock | None = None) -> None:
        self._limit_s = limit_s
        self._stride_s = stride_s
        self._clock = clock or SystemClock()
        self._last_tick = self._clock.now()
        self._silent_s = 0.0

    def heard(self) -> None:
        """Note a sign of life."""
        self._silent_s = 0.0

    def tick(self) -> bool:
        """Return True once the silence is longer than the limit."""
        now = self._clock.now()
        self._silent_s += min(now - self._last_tick, self._stride_s)
        self._last_tick = now
        return self._silent_s > self._limit_s
