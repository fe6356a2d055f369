"""Several engines of the same weights, seen as one.

Small models do not fill many threads: between two large products one thread works alone. Two engines of one
thread each sample nearly twice as fast as one of two threads.

``seats`` says where a request goes. An engine that serves nobody any more is taken out: its requests are given
to others, and ``attendance`` takes it back once it works and has the weights in force.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from lehr.core.batch import Manifest
from lehr.core.errors import ConfigError, DeadlineExceeded, LehrError
from lehr.core.trace import Completion, Sampling, Version
from lehr.engine.affinity import Beginning, beginnings
from lehr.engine.attendance import FIRST_PROBE_S, PROBE_S, Attendance
from lehr.engine.base import EngineBroken, EngineError, EngineStats, InFlight, UnknownSession
from lehr.engine.messages import Allotment
from lehr.engine.seats import BROKEN, Member, Seat, Seating, all_of

T = TypeVar("T")

MOVES = 3
"""Engines that may break under one request before it is no longer given to another: it may be the cause."""
PATIENCE_S = 5.0
"""How long a request waits for an engine to come back where all of them are out."""


@dataclass(eq=False, slots=True)
class _Ticket:
    """A request that the router holds. seated: a member has it."""

    session: str
    seated: bool = False
    aborted: bool = False


class Router:
    """Implements ``engine.base.Engine`` over its members, all of which begin with the same weights.

    The versions of a session never fall when it moves. By default new weights are in force in all members
    before the next request is passed on. With ``rolling``, members switch one after the other while the others
    serve: for engines that take long over it. Meanwhile a session that has seen new weights goes to members
    that have them. Either way a switch that was begun is finished, whether or not its caller waits.
    """

    def __init__(
        self,
        members: Sequence[Member],
        *,
        rolling: bool = False,
        patience_s: float = PATIENCE_S,
        first_probe_s: float = FIRST_PROBE_S,
        probe_s: float = PROBE_S,
    ) -> None:
        if not members:
            raise ConfigError("a router was given no engine", expected="at least one")
        self._seats = tuple(Seat(number, member) for number, member in enumerate(members))
        self._seating = Seating()
        self._rolling, self._patience_s = rolling, patience_s
        self._attendance = Attendance(self._seats, self._admit, first_probe_s=first_probe_s, probe_s=probe_s)
        self._tickets: set[_Ticket] = set()
        self._switching = asyncio.Lock()
        self._ahead: Version | None = None
        self._risen: set[str] = set()
        self._version: Version | None = None
        self._seen: Version | None = None
        self._manifests: dict[Version, Manifest] = {}
        self._adapters: dict[str, Path] = {}
        self._parts: list[Allotment] | None = None
        self._paused = False

    # requests

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, *, session: str = "", timeout_s: float = 600.0
    ) -> Completion:
        """Return one completion, from the engine that has most of it cached unless that one is busy. Where an
        engine breaks, another one makes the completion from its beginning: nobody has seen any of it.
        """

        async def ask(seat: Seat, left_s: float) -> Completion:
            had = seat.version
            made = await seat.engine.generate(tokens, sampling, session=session, timeout_s=left_s)
            if len(made.versions):
                _require(had, Version.unpack(int(made.versions.min())))
            return made

        done = await self._serve(tokens, session, timeout_s, ask)
        if done is None:
            return _nothing()
        if len(done.versions):
            newest = Version.unpack(int(done.versions.max()))
            self._seen = newest if self._seen is None else max(self._seen, newest)
            if session and self._ahead is not None and newest >= self._ahead:
                self._risen.add(session)
        return done

    async def score(self, tokens: Sequence[int], *, temperature: float = 1.0) -> NDArray[np.float32]:
        """Return float32[T-1]: the log-probability of each token after the first."""

        def ask(seat: Seat, left_s: float) -> Coroutine[Any, Any, NDArray[np.float32]]:
            return seat.engine.score(tokens, temperature=temperature)

        done = await self._serve(tokens, "", 600.0, ask)
        if done is None:
            raise EngineError("the request was aborted before an engine had it")
        return done

    async def _serve(
        self,
        tokens: Sequence[int],
        session: str,
        timeout_s: float,
        ask: Callable[[Seat, float], Coroutine[Any, Any, T]],
    ) -> T | None:
        """Have a member do it, and another one if that one breaks; None where it was aborted in between."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        chain = beginnings(tokens)
        ticket = _Ticket(session)
        self._tickets.add(ticket)
        moves = 0
        try:
            while True:
                seat = await self._seat(chain, ticket, ends)
                if seat is None:
                    return None
                with self._taken(seat, ticket):
                    try:
                        return await ask(seat, max(0.001, ends - loop.time()))
                    except BROKEN as error:
                        self._attendance.take_out(seat, error)
                        moves += 1
                        if moves >= min(MOVES, len(self._seats)):
                            raise
                    except DeadlineExceeded:
                        self._attendance.suspect(seat)
                        raise
        finally:
            self._tickets.discard(ticket)

    @contextmanager
    def _taken(self, seat: Seat, ticket: _Ticket) -> Generator[None]:
        seat.load += 1
        ticket.seated = True
        try:
            yield
        finally:
            ticket.seated = False
            seat.load -= 1

    async def _seat(self, chain: Sequence[Beginning], ticket: _Ticket, ends: float) -> Seat | None:
        """Wait for a member that may take a request; None where it was aborted."""
        loop = asyncio.get_running_loop()
        out_since: float | None = None
        while not ticket.aborted:
            may = partial(self._may, session=ticket.session)
            seat = self._seating.choose(self._seats, chain, ticket.session, may)
            if seat is not None:
                return seat
            until = ends
            if not self._attendance.serving:
                out_since = loop.time() if out_since is None else out_since
                until = min(ends, out_since + self._patience_s)
                if loop.time() >= until or self._attendance.closed:
                    raise self._attendance.nobody()
            else:
                out_since = None
            if loop.time() >= ends:
                raise DeadlineExceeded("no engine took the request before its deadline")
            await self._attendance.change(until - loop.time())
        return None

    def _may(self, seat: Seat, session: str) -> bool:
        if not seat.open:
            return False
        return session not in self._risen or self._ahead is None or seat.version == self._ahead

    # weights

    async def fetch(self, manifest: Manifest) -> None:
        """Load published weights into every member that serves."""
        self._manifests[manifest.version] = manifest
        try:
            await self._everyone(lambda seat: seat.engine.fetch(manifest))
        except LehrError:
            self._manifests.pop(manifest.version, None)  # else who comes back would have to have them
            raise

    async def activate(self, version: Version, in_flight: InFlight = "keep") -> None:
        """Switch every member. Raises what they say where none of them could; one that alone could not is out,
        and comes back with these weights.
        """
        await asyncio.shield(self._attendance.begin(self._switch(version, in_flight)))

    async def _switch(self, version: Version, in_flight: InFlight) -> None:
        async with self._switching:
            seats = self._attendance.serving
            if not seats:
                raise self._attendance.nobody()
            self._ahead = version
            failed: list[tuple[Seat, Exception]] = []
            try:
                for some in [[seat] for seat in seats] if self._rolling else [seats]:
                    failed += await self._switch_some(some, version, in_flight)
                    refused = any(not isinstance(error, BROKEN) for _, error in failed)
                    if refused and not any(seat.version == version for seat in seats):
                        break  # what one refuses is not tried on the others
                self._conclude(seats, failed, version)
            finally:
                self._ahead = None
                self._risen.clear()
                self._attendance.tell()

    async def _switch_some(
        self, seats: Sequence[Seat], version: Version, in_flight: InFlight
    ) -> list[tuple[Seat, Exception]]:
        """Switch members at once, with no new request for them meanwhile; return those that failed."""
        for seat in seats:
            seat.updating = True
        try:
            found = await all_of(seat.engine.activate(version, in_flight) for seat in seats)
        finally:
            for seat in seats:
                seat.updating = False
        failed: list[tuple[Seat, Exception]] = []
        for seat, result in zip(seats, found, strict=True):
            if result is None:
                seat.version = version
            else:
                failed.append((seat, result))
                if isinstance(result, BROKEN):
                    self._attendance.take_out(seat, result)
        self._attendance.tell()
        return failed

    def _conclude(
        self, seats: Sequence[Seat], failed: Sequence[tuple[Seat, Exception]], version: Version
    ) -> None:
        """Put weights in force that a member has; raise where none has them."""
        if not any(seat.version == version for seat in seats):
            raise failed[0][1]
        self._version = version
        self._manifests = {v: m for v, m in self._manifests.items() if v >= version}
        self._seating.prefixes.clear()
        for seat, error in failed:
            self._attendance.take_out(seat, error)

    async def _admit(self, seat: Seat, found: Version) -> None:
        """Take a member back with the weights in force, and with all else that it was not there to be told.

        Raises :class:`EngineError` where it cannot have them.
        """
        fetched: set[Version] = set()
        while True:
            wanted = self._version or self._seen or found
            for version in [v for v in self._manifests if v > wanted and v not in fetched]:
                await seat.engine.fetch(self._manifests[version])  # the others have them, and wait to switch
                fetched.add(version)
            if found > wanted:
                raise EngineError(f"it has weights {found}, newer than {wanted}, which are in force")
            if found < wanted:
                manifest = self._manifests.get(wanted)
                if manifest is None:
                    raise EngineError(f"it has weights {found}, and where {wanted} lie is not known")
                await seat.engine.fetch(manifest)
            async with self._switching:
                if wanted != (self._version or wanted):
                    continue  # others were put in force while these were fetched
                if self._version is not None:
                    await seat.engine.activate(wanted)
                if self._parts is not None:
                    await seat.engine.allot(self._parts[seat.number])
                for name, folder in self._adapters.items():
                    await seat.engine.load_adapter(name, folder)
                await (seat.engine.pause() if self._paused else seat.engine.resume())
                if any(v > wanted and v not in fetched for v in self._manifests):
                    found = wanted
                    continue
                self._seating.prefixes.forget(seat.number)
                seat.version, seat.out = wanted, None
                return

    # the rest of the protocol

    async def pause(self) -> None:
        """Pause every member."""
        self._paused = True
        await self._everyone(lambda seat: seat.engine.pause())

    async def resume(self) -> None:
        """Let every member go on."""
        self._paused = False
        await self._everyone(lambda seat: seat.engine.resume())

    async def flush(self) -> None:
        """Make every member forget its cached prefixes."""
        self._seating.prefixes.clear()
        await self._everyone(lambda seat: seat.engine.flush())

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter in every member."""
        await self._everyone(lambda seat: seat.engine.load_adapter(name, folder))
        self._adapters[name] = folder

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter in every member."""
        self._adapters.pop(name, None)
        await self._everyone(lambda seat: seat.engine.unload_adapter(name))

    async def abort(self, session: str = "") -> int:
        """End the requests of ``session`` (all with "") with what they have; return how many there were."""
        ended = 0
        for ticket in self._tickets:
            if not session or ticket.session == session:
                ticket.aborted = True  # one that a member has ends there, and is not given to another
                ended += not ticket.seated
        self._attendance.tell()
        if self._attendance.serving:
            ended += sum(await self._everyone(lambda seat: _ended(seat.engine, session)))
        if session and not ended:
            raise UnknownSession(f"session {session!r} has no request that waits or runs")
        return ended

    async def allot(self, allotment: Allotment) -> None:
        """Divide a share of the machine between the members."""
        parts = self._parts = allotment.divided(len(self._seats))
        await self._everyone(lambda seat: seat.engine.allot(parts[seat.number]))

    async def stats(self) -> EngineStats:
        """Return sums over the members that serve; ``busy_s`` is their mean, ``version`` the oldest of them."""

        async def ask(seat: Seat) -> EngineStats:
            had = seat.version
            said = await seat.engine.stats()
            _require(had, said.version)
            return said

        return EngineStats.of_all(await self._everyone(ask))

    @property
    def out(self) -> dict[int, str]:
        """Members that take no requests now, by number, and why."""
        return {seat.number: str(seat.out) for seat in self._seats if seat.out is not None}

    async def close(self) -> None:
        """Abort what runs in every member. Idempotent. A member that is out may be gone."""
        await self._attendance.close()
        found = await all_of(seat.engine.close() for seat in self._seats)
        for result in found:
            if result is not None and not isinstance(result, BROKEN):
                raise result

    async def _everyone(self, call: Callable[[Seat], Coroutine[Any, Any, T]]) -> list[T]:
        """Call every member that serves. One that turns out to be broken is taken out; where all are, and for
        any other failure, the first is raised.
        """
        seats = self._attendance.serving
        if not seats:
            raise self._attendance.nobody()
        found = await all_of(call(seat) for seat in seats)
        failures: list[Exception] = []
        for seat, result in zip(seats, found, strict=True):
            if isinstance(result, Exception):
                failures.append(result)
                if isinstance(result, BROKEN):
                    self._attendance.take_out(seat, result)
        other = next((error for error in failures if not isinstance(error, BROKEN)), None)
        if other is not None or len(failures) == len(seats):
            raise other or failures[0]
        return [result for result in found if not isinstance(result, Exception)]


def _require(had: Version | None, found: Version) -> None:
    """Raise :class:`EngineBroken` where a member has older weights than before: it was started again."""
    if had is not None and found < had:
        raise EngineBroken(f"it answers with weights {found}, and was given {had}")


def _nothing() -> Completion:
    """Return what a request has that was aborted before an engine had it."""
    floats, none = np.zeros(0, np.float32), np.zeros(0, np.int32)
    return Completion(none, floats, floats, floats, np.zeros(0, np.int64), "abort")


async def _ended(member: Member, session: str) -> int:
    try:
        return await member.abort(session)
    except UnknownSession:
        return 0  # its requests are another member's
