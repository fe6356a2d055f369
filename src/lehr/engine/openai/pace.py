"""Keeps to what a server allows: requests and tokens per minute, and pauses that it asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from lehr.core.clock import Clock, SystemClock

BURST_S = 6.0
"""Seconds of the allowance that may be used at once. With a whole minute's, the first minute would see twice
what is allowed."""


class Bucket:
    """An allowance that refills evenly (a token bucket). An amount larger than it can hold leaves a debt."""

    def __init__(self, per_minute: float, clock: Clock, *, least: float = 1.0) -> None:
        self._rate = per_minute / 60.0
        self._most = max(least, self._rate * BURST_S)
        self._clock = clock
        self._level, self._seen = self._most, clock.now()

    def wait_s(self, amount: float) -> float:
        """Return the seconds until ``amount`` may be taken, 0 for now."""
        self._refill()
        missing = min(amount, self._most) - self._level
        return missing / self._rate if missing > 1e-9 else 0.0

    def take(self, amount: float) -> None:
        """Take it; a negative amount gives back."""
        self._refill()
        self._level = min(self._most, self._level - amount)

    def _refill(self) -> None:
        now = self._clock.now()
        self._level = min(self._most, self._level + (now - self._seen) * self._rate)
        self._seen = now


class Pace:
    """Lets requests through in the order in which they come, none before its time."""

    def __init__(
        self,
        requests_per_minute: float = 0,
        tokens_per_minute: float = 0,
        *,
        clock: Clock | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._clock = clock or SystemClock()
        self._sleep = sleep
        self._requests = Bucket(requests_per_minute, self._clock) if requests_per_minute else None
        self._tokens = Bucket(tokens_per_minute, self._clock) if tokens_per_minute else None
        self._free_at = self._clock.now()
        self._line = asyncio.Lock()

    async def admit(self, tokens: float) -> None:
        """Wait until a request of about ``tokens`` may go out, and count it."""
        async with self._line:
            while (wait := self._wait_s(tokens)) > 0:
                await self._sleep(wait)
            if self._requests:
                self._requests.take(1)
            if self._tokens:
                self._tokens.take(tokens)

    def correct(self, estimated: float, used: float) -> None:
        """Count what a request really used instead of its estimate."""
        if self._tokens:
            self._tokens.take(used - estimated)

    def hold(self, seconds: float) -> None:
        """Let nothing through for ``seconds`` from now."""
        self._free_at = max(self._free_at, self._clock.now() + seconds)

    def _wait_s(self, tokens: float) -> float:
        waits = [self._free_at - self._clock.now()]
        waits += [self._requests.wait_s(1)] if self._requests else []
        waits += [self._tokens.wait_s(tokens)] if self._tokens else []
        return max(waits)
