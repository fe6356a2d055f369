"""Time as a dependency, so that tests turn the clock themselves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from lehr.core.errors import DeadlineExceeded


class Clock(Protocol):
    """Monotonic seconds."""

    def now(self) -> float:
        """Return monotonic seconds; only differences mean anything."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Return ``time.monotonic()``."""
        return time.monotonic()


class VirtualClock:
    """A clock that stands still until it is advanced."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock forward by ``seconds`` (not negative)."""
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {seconds} s")
        self._now += seconds


@dataclass(frozen=True, slots=True)
class Deadline:
    """An absolute point in time inside a process. On the wire it travels as remaining seconds."""

    at: float
    clock: Clock

    @classmethod
    def after(cls, seconds: float, clock: Clock | None = None) -> Deadline:
        """Return the deadline ``seconds`` from now."""
        clock = clock or SystemClock()
        return cls(clock.now() + seconds, clock)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - self.clock.now())

    def check(self, what: str) -> None:
        """Raise :class:`DeadlineExceeded` naming ``what`` if no time is left."""
        if self.remaining_s <= 0:
            raise DeadlineExceeded(f"{what} ran past its deadline")
