"""Which members of a router serve: one that is broken is taken out, asked whether it works, and taken back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from lehr.core.errors import LehrError
from lehr.core.trace import Version
from lehr.engine.base import EngineBroken
from lehr.engine.seats import BROKEN, Seat

T = TypeVar("T")

FIRST_PROBE_S, LAST_PROBE_S = 0.25, 30.0
"""Between two questions to a member that is out; the wait doubles."""
PROBE_S = 30.0
"""How long a member may take to say that it works."""

log = logging.getLogger("lehr.engine.router")


class Attendance:
    """Watches over seats. ``admit`` makes a member that works again ready, given the weights that it has; it
    raises where that cannot be done yet.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        admit: Callable[[Seat, Version], Awaitable[None]],
        *,
        first_probe_s: float = FIRST_PROBE_S,
        probe_s: float = PROBE_S,
    ) -> None:
        self._seats, self._admit = seats, admit
        self._first_probe_s, self._probe_s = first_probe_s, probe_s
        self._changed = asyncio.Event()
        self._suspected: set[Seat] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.closed = False

    @property
    def serving(self) -> list[Seat]:
        """Members that are not out."""
        return [seat for seat in self._seats if seat.out is None]

    def begin(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run work that ends with this object, whoever waits for it."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it gets it; nobody may be left

    def tell(self) -> None:
        """Wake whoever waits for a member."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, timeout_s: float) -> None:
        """Wait until something is told, or the time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def nobody(self) -> LehrError:
        """Return what to raise where all members are out."""
        last = self._seats[-1].out
        if len(self._seats) == 1 and isinstance(last, LehrError):
            return last
        causes = "; ".join(dict.fromkeys(str(seat.out).rstrip(".") for seat in self._seats))
        kind = type(last) if isinstance(last, BROKEN) and isinstance(last, LehrError) else EngineBroken
        return kind(f"none of the {len(self._seats)} engines serves any more: {causes}")

    def take_out(self, seat: Seat, error: Exception) -> None:
        """Give a member no more requests until it has been seen to work."""
        if seat.out is None and not self.closed:
            log.warning("engine %d is taken out: %s", seat.number, error)
            seat.out = error
            self.begin(self._bring_back(seat))
            self.tell()

    def suspect(self, seat: Seat) -> None:
        """Ask a member that let a deadline pass whether it works at all."""
        if seat not in self._suspected and seat.out is None and not self.closed:
            self._suspected.add(seat)
            self.begin(self._question(seat))

    async def close(self) -> None:
        """Ask no more, and end what was begun."""
        self.closed = True
        self.tell()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _question(self, seat: Seat) -> None:
        try:
            async with asyncio.timeout(self._probe_s):
                await seat.engine.stats()
        except TimeoutError:
            late = f"a request ran out of time, and for {self._probe_s:g} s it did not say whether it works"
            self.take_out(seat, EngineBroken(late))
        except BROKEN as error:
            self.take_out(seat, error)
        except LehrError as error:
            log.warning("engine %d does not tell its state: %s", seat.number, error)
        finally:
            self._suspected.discard(seat)

    async def _bring_back(self, seat: Seat) -> None:
        delay_s = self._first_probe_s
        told = str(seat.out)
        while True:
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, LAST_PROBE_S)
            try:
                async with asyncio.timeout(self._probe_s):
                    found = (await seat.engine.stats()).version
                await self._admit(seat, found)
            except Exception as error:  # the boundary: whatever it is, the member is not ready
                why = str(error) or f"no answer within {self._probe_s:g} s"
                if why != told:
                    log.warning("engine %d stays out: %s", seat.number, why)
                    told = why
                continue
            log.warning("engine %d is back, with weights %s", seat.number, seat.version)
            self.tell()
            return
