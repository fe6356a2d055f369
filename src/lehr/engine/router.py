"""Several engines of the same weights, seen as one.

Small models do not fill many threads: between two large products one thread works alone. Two engines of one
thread each sample nearly twice as fast as one of two threads.

The turns of a session go to one engine, and so do requests with the same prompt (the members of a group),
because what they share is cached there. Both go elsewhere when their engine has ``SLACK`` requests more than
the idlest one: an imbalance costs more than computing a prompt again.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from lehr.core.batch import Manifest
from lehr.core.errors import ConfigError
from lehr.core.trace import Completion, Sampling, Version
from lehr.engine.base import Engine, EngineStats, InFlight, TierStats
from lehr.engine.messages import Allotment

K = TypeVar("K")
T = TypeVar("T")

SLACK = 8
"""Requests that an engine may have more than the idlest one before its sessions move."""
REMEMBERED = 4096
"""Sessions and prompts whose engine is remembered."""


class Member(Engine, Protocol):
    """An engine that can be told how much of the machine to use."""

    async def abort(self, session: str = "") -> int:
        """End the requests of ``session`` (all with "") with what they have; return how many there were."""
        ...

    async def allot(self, allotment: Allotment) -> None:
        """Use another share of the machine from the next step on."""
        ...


class Router:
    """Implements ``engine.base.Engine`` over its members, all of which begin with the same weights.

    New weights are in force in all members before the next request is passed on, so that the versions of a
    session never fall when it moves.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        if not members:
            raise ConfigError("a router was given no engine", expected="at least one")
        self._members = tuple(members)
        self._load = [0] * len(members)
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._prompts: OrderedDict[bytes, int] = OrderedDict()
        self._settled = asyncio.Event()
        self._settled.set()

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, *, session: str = "", timeout_s: float = 600.0
    ) -> Completion:
        """Return one completion, from the engine that has most of it cached unless that one is busy."""
        await self._settled.wait()
        async with self._seat(tokens, session) as member:
            return await member.generate(tokens, sampling, session=session, timeout_s=timeout_s)

    async def score(self, tokens: Sequence[int], *, temperature: float = 1.0) -> NDArray[np.float32]:
        """Return float32[T-1]: the log-probability of each token after the first."""
        await self._settled.wait()
        async with self._seat(tokens, "") as member:
            return await member.score(tokens, temperature=temperature)

    async def fetch(self, manifest: Manifest) -> None:
        """Load published weights into every member."""
        await _all(member.fetch(manifest) for member in self._members)

    async def activate(self, version: Version, in_flight: InFlight = "keep") -> None:
        """Switch every member; requests that come meanwhile wait for the last of them."""
        self._settled.clear()
        try:
            await _all(member.activate(version, in_flight) for member in self._members)
        finally:
            self._settled.set()

    async def abort(self, session: str = "") -> int:
        """End the requests of ``session`` (all with "") with what they have; return how many there were."""
        return sum(await _all(member.abort(session) for member in self._members))

    async def allot(self, allotment: Allotment) -> None:
        """Divide a share of the machine between the members."""
        parts = divided(allotment, len(self._members))
        await _all(member.allot(part) for member, part in zip(self._members, parts, strict=True))

    async def stats(self) -> EngineStats:
        """Return sums over the members; ``busy_s`` is their mean, ``version`` the oldest in force."""
        found = await _all(member.stats() for member in self._members)
        return EngineStats(
            version=min(s.version for s in found),
            running=sum(s.running for s in found),
            waiting=sum(s.waiting for s in found),
            blocks_free=sum(s.blocks_free for s in found),
            blocks_cached=sum(s.blocks_cached for s in found),
            blocks_held=sum(s.blocks_held for s in found),
            blocks_total=sum(s.blocks_total for s in found),
            prompt_tokens=sum(s.prompt_tokens for s in found),
            cached_tokens=sum(s.cached_tokens for s in found),
            own_tokens=sum(s.own_tokens for s in found),
            busy_s=sum(s.busy_s for s in found) / len(found),
            steps=sum(s.steps for s in found),
            drafted_tokens=sum(s.drafted_tokens for s in found),
            accepted_tokens=sum(s.accepted_tokens for s in found),
            tiers=sum((s.tiers for s in found), TierStats()),
        )

    async def close(self) -> None:
        """Abort what runs in every member. Idempotent."""
        await _all(member.close() for member in self._members)

    @asynccontextmanager
    async def _seat(self, tokens: Sequence[int], session: str) -> AsyncGenerator[Member]:
        chosen = self._choose(np.asarray(tokens, np.int32).tobytes(), session)
        self._load[chosen] += 1
        try:
            yield self._members[chosen]
        finally:
            self._load[chosen] -= 1

    def _choose(self, prompt: bytes, session: str) -> int:
        home = self._sessions.get(session) if session else None
        if home is None:
            home = self._prompts.get(prompt)
        idlest = min(range(len(self._load)), key=self._load.__getitem__)
        chosen = idlest if home is None or self._load[home] - self._load[idlest] >= SLACK else home
        _remember(self._prompts, prompt, chosen)
        if session:
            _remember(self._sessions, session, chosen)
        return chosen


def divided(allotment: Allotment, count: int) -> list[Allotment]:
    """Return ``count`` parts: cores of their own where there are enough, else all of them share the cores."""
    threads = max(1, allotment.threads // count)
    if len(allotment.cores) < count:
        return [Allotment(threads, allotment.cores)] * count
    return [Allotment(threads, allotment.cores[number::count]) for number in range(count)]


def _remember(places: OrderedDict[K, int], key: K, place: int) -> None:
    places[key] = place
    places.move_to_end(key)
    if len(places) > REMEMBERED:
        places.popitem(last=False)


async def _all(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run calls side by side; the first failure cancels the others and is raised as it is."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
