"""The members of a router: which of them take requests, how busy each is, and which one a request goes to."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from lehr.core.errors import RoleLost
from lehr.core.trace import Version
from lehr.engine.affinity import Beginning, Prefixes
from lehr.engine.base import Engine, EngineBroken
from lehr.engine.messages import Allotment

T = TypeVar("T")

BROKEN = (RoleLost, EngineBroken, ConnectionError)
"""What says that an engine serves nobody, rather than that it refused one request."""
SLACK = 8
"""Requests that an engine may have more than the idlest one before its sessions and prompts move."""
WORTH = 128
"""Cached tokens of a shared beginning that make up for one request more."""
SESSIONS = 4096
"""Sessions whose engine is remembered."""


class Member(Engine, Protocol):
    """An engine that can be told how much of the machine to use."""

    async def allot(self, allotment: Allotment) -> None:
        """Use another share of the machine from the next step on."""
        ...


@dataclass(eq=False, slots=True)
class Seat:
    """A member. load: its requests. version: of its weights, as far as known.

    out: why it takes no requests, until it has been seen to work. updating: its weights are being switched.
    """

    number: int
    engine: Member
    load: int = 0
    version: Version | None = None
    out: Exception | None = None
    updating: bool = False

    @property
    def open(self) -> bool:
        """Whether requests may go there."""
        return self.out is None and not self.updating


class Seating:
    """Chooses. Turns of a session go to one engine, and so do prompts that begin alike: what they share is
    cached there. Both go elsewhere when their engine has too many requests more than the idlest one.
    """

    def __init__(self) -> None:
        self.prefixes = Prefixes()
        self._sessions: OrderedDict[str, Seat] = OrderedDict()

    def choose(
        self, seats: Sequence[Seat], chain: Sequence[Beginning], session: str, may: Callable[[Seat], bool]
    ) -> Seat | None:
        """Return where a request goes, and remember it; None where no seat ``may`` take it."""
        allowed = [seat for seat in seats if may(seat)]
        if not allowed:
            return None
        idlest = min(allowed, key=lambda seat: seat.load)
        home, slack = self._home(allowed, chain, session)
        chosen = idlest if home is None or home.load - idlest.load >= slack else home
        self.prefixes.note(chain, chosen.number)
        if session:
            self._sessions[session] = chosen
            self._sessions.move_to_end(session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        return chosen

    def _home(
        self, allowed: Sequence[Seat], chain: Sequence[Beginning], session: str
    ) -> tuple[Seat | None, int]:
        """Return the seat that has most of a request cached, and how much busier than the idlest it may be."""
        home = self._sessions.get(session) if session else None
        if home in allowed:
            return home, SLACK
        by_number = {seat.number: seat for seat in allowed}
        found = self.prefixes.find(chain, by_number)
        if not found.members:
            return None, 0
        home = min((by_number[number] for number in found.members), key=lambda seat: seat.load)
        return home, SLACK if found.whole else min(SLACK, found.tokens // WORTH)


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T | Exception]:
    """Run calls side by side and return what each returned or raised; a cancelled caller cancels them."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        found = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
    results: list[T | Exception] = []
    for result in found:
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
        results.append(result)
    return results
