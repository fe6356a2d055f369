"""Hands out boxes: warm ones where there are, in the order of asking, never more than the limit at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Literal, overload

from lehr.core.errors import DeadlineExceeded, LehrError
from lehr.core.protocols import NullRecorder, Recorder
from lehr.sandbox.base import BACKENDS, Backend, Box, Snapshot, Spec
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.lease import LeasedBox, Origin
from lehr.sandbox.metrics import exposition
from lehr.sandbox.setups import Setup, SetUps

RELEASE_S = 5.0
LEASE_S = 3600.0
WARM_SPECS = 8
MAKERS = 2


@dataclass(slots=True)
class Waiter:
    """Somebody in line."""

    domain: str
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Pool:
    """Boxes for one event loop. Life cycle: made anywhere, used in a running loop, ended by :meth:`close`.

    backend: a registered name or a backend. warm: boxes kept ready per spec, refilled ahead of demand: one at
    a time, two at a time below half of it. limit: boxes leased at once. quotas: the most of them that one
    domain may hold, by domain. lease_s: a lease ends so long after its last call, unless it is renewed.
    recorder: gets one ``sandbox.exec`` per call.
    """

    def __init__(
        self,
        backend: str | Backend = "bwrap",
        *,
        warm: int = 2,
        limit: int = 8,
        quotas: Mapping[str, int] | None = None,
        lease_s: float = LEASE_S,
        recorder: Recorder | None = None,
    ) -> None:
        self._backend: Backend = BACKENDS.get(backend)() if isinstance(backend, str) else backend
        self._warm_target = warm
        self._limit = limit
        self._quotas = dict(quotas or {})
        self._lease_s = lease_s
        self._recorder = recorder or NullRecorder()
        self._warm: OrderedDict[Spec, deque[Box]] = OrderedDict()
        self._making: dict[Spec, int] = {}
        self._leased: set[LeasedBox] = set()
        self._held: Counter[str] = Counter()
        self._line: deque[Waiter] = deque()
        self.counts: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._setups = SetUps(self)
        self._closed = False

    def lease(
        self, spec: Spec, *, timeout_s: float = 30.0, snapshot: Snapshot | None = None, domain: str = ""
    ) -> AbstractAsyncContextManager[LeasedBox]:
        """Yield a box and destroy it at the end; see :meth:`lehr.sandbox.base.Boxes.lease`."""
        return self._lease(spec, timeout_s, snapshot, domain)

    @contextlib.asynccontextmanager
    async def _lease(
        self, spec: Spec, timeout_s: float, snapshot: Snapshot | None, domain: str
    ) -> AsyncGenerator[LeasedBox, None]:
        box = await self.acquire(spec, timeout_s=timeout_s, snapshot=snapshot, domain=domain)
        try:
            yield box
        finally:
            await self.release(box)

    async def acquire(
        self, spec: Spec, *, timeout_s: float = 30.0, snapshot: Snapshot | None = None, domain: str = ""
    ) -> LeasedBox:
        """Return a box, fresh or in the state of a snapshot; pair with :meth:`release`.

        Raises ``DeadlineExceeded`` with the reason.
        """
        loop = asyncio.get_running_loop()
        asked = loop.time()
        await self._admit(timeout_s, domain)
        admitted = loop.time()
        queue_s = admitted - asked
        try:
            box = self._take_warm(spec) if snapshot is None else None
            how: Literal["warm", "cold", "snapshot"] = "warm" if box else "snapshot" if snapshot else "cold"
            if box is None:
                left = max(0.0, timeout_s - queue_s)
                try:
                    async with asyncio.timeout(left):
                        box = await self._backend.create(spec, snapshot)
                except TimeoutError as error:
                    raise DeadlineExceeded(f"a new box was not ready within {left:.1f} s") from error
        except BaseException:
            self._leave(domain)
            raise
        self.counts[how] += 1
        self.counts["queue_us"] += int(1e6 * queue_s)
        origin = Origin(self._backend.name, how, queue_s, loop.time() - admitted, domain)
        leased = LeasedBox(
            box, self._recorder, origin, self._lease_s, spec.limits.lease_s, self._expire, self.counts
        )
        self._leased.add(leased)
        if snapshot is None:
            self._refill(spec)
            return leased
        try:
            async with asyncio.timeout_at(asked + timeout_s):
                await leased.after_restore(snapshot)
        except BaseException as error:
            await self.release(leased)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(f"a restored box was not ready within {timeout_s:g} s") from error
            raise
        return leased

    @overload
    async def release(self, box: Box, *, snapshot: Literal[False] = False) -> None: ...
    @overload
    async def release(self, box: Box, *, snapshot: Literal[True]) -> Snapshot: ...
    async def release(self, box: Box, *, snapshot: bool = False) -> Snapshot | None:
        """Destroy a box of :meth:`acquire`. Idempotent, shielded against cancellation, bounded in time.

        snapshot: record its state first and return it; that is refused for a box that was released before.
        """
        if not isinstance(box, LeasedBox) or box not in self._leased:
            if snapshot:
                raise SandboxError(f"{box.id} was released", expected="a box whose lease is open")
            return None
        try:
            return await box.snapshot() if snapshot else None
        finally:
            self._leased.discard(box)
            box.end("was released")
            await asyncio.shield(self._spawn(self._end(box)))

    def prepared(self, spec: Spec, setup: Setup) -> AbstractAsyncContextManager[Snapshot]:
        """Yield the state after a set-up; see :meth:`lehr.sandbox.setups.SetUps.ready`."""
        return self._setups.ready(spec, setup)

    def _expire(self, box: LeasedBox) -> None:
        """Called by a lease that nobody used or renewed for too long."""
        if box in self._leased:
            self._leased.discard(box)
            self.counts["expired"] += 1
            self._spawn(self._end(box))

    async def _end(self, box: LeasedBox) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_S):
                    await box.destroy()
        finally:
            self._leave(box.origin.domain)

    @property
    def _taken(self) -> int:
        return self._held.total()

    def _fits(self, domain: str) -> bool:
        quota = self._quotas.get(domain, self._limit)
        return self._taken < self._limit and self._held[domain] < quota

    async def _admit(self, timeout_s: float, domain: str) -> None:
        """Wait in line for one of ``limit`` places, and for one of the domain's own."""
        if self._closed:
            raise SandboxError("the pool is closed")
        if self._fits(domain) and not any(waiter.domain == domain for waiter in self._line):
            self._held[domain] += 1
            return
        waiter = Waiter(domain)
        self._line.append(waiter)
        turn = waiter.turn
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave(domain)
            elif waiter in self._line:
                self._line.remove(waiter)
            if isinstance(error, TimeoutError):
                raise self._too_late(timeout_s, domain) from error
            raise

    def _too_late(self, timeout_s: float, domain: str) -> DeadlineExceeded:
        self.counts["too_late"] += 1
        others = f"{len(self._line)} others wait"
        quota = self._quotas.get(domain, self._limit)
        if self._taken < self._limit and self._held[domain] >= quota:
            why = f"{domain} holds its {quota} of {self._limit} and {others}"
            return DeadlineExceeded(
                f"no box within {timeout_s:g} s: {why}", hint=f"Raise the quota of {domain}, or release sooner"
            )
        return DeadlineExceeded(
            f"no box within {timeout_s:g} s: all {self._limit} are leased and {others}",
            hint="Raise the pool's limit, or release boxes sooner",
        )

    def _leave(self, domain: str) -> None:
        """Give a place back, and to the first in line who may have one."""
        self._held[domain] -= 1
        for waiter in list(self._line):
            if self._taken >= self._limit:
                return
            if waiter.turn.done():
                self._line.remove(waiter)
            elif self._fits(waiter.domain):
                self._line.remove(waiter)
                self._held[waiter.domain] += 1
                waiter.turn.set_result(None)

    def metrics(self) -> str:
        """Return the pool's state in the text format of Prometheus."""
        return exposition(
            self._backend.name,
            {"leased": self.leased, "waiting": self.waiting, "warm": sum(map(len, self._warm.values()))},
            self.counts,
        )

    @property
    def leased(self) -> int:
        """How many boxes are leased now."""
        return len(self._leased)

    @property
    def waiting(self) -> int:
        """How many wait in line now."""
        return len(self._line)

    def warm_boxes(self, spec: Spec) -> int:
        """Return how many boxes of ``spec`` are ready."""
        return len(self._warm.get(spec, ()))

    def _take_warm(self, spec: Spec) -> Box | None:
        ready = self._warm.get(spec)
        while ready:
            box = ready.popleft()
            if not getattr(box, "broken", False):
                return box
            self._spawn(box.destroy())
        return None

    def _refill(self, spec: Spec) -> None:
        """Start making boxes until ``warm`` are ready or on their way; forget the spec unused longest."""
        if self._closed or self._warm_target <= 0:
            return
        self._warm.setdefault(spec, deque())
        self._warm.move_to_end(spec)
        while len(self._warm) > WARM_SPECS:
            _, old = self._warm.popitem(last=False)
            for box in old:
                self._spawn(box.destroy())
        making = self._making.get(spec, 0)
        ready = len(self._warm[spec])
        wanted = min(self._warm_target - ready, MAKERS if 2 * ready < self._warm_target else 1)
        for _ in range(wanted - making):
            self._making[spec] = self._making.get(spec, 0) + 1
            self._spawn(self._make_warm(spec))

    async def _make_warm(self, spec: Spec) -> None:
        try:
            box = await self._backend.create(spec, ahead=True)
        except LehrError as error:
            self._making[spec] -= 1
            self._recorder.record("sandbox.refill_failed", backend=self._backend.name, detail=str(error))
            return
        except BaseException:
            self._making[spec] -= 1
            raise
        self._making[spec] -= 1
        self.counts["made_warm"] += 1
        if self._closed or spec not in self._warm:
            await box.destroy()
            return
        self._warm[spec].append(box)
        self._refill(spec)

    def _spawn(self, work: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Destroy every box, leased or warm. Whoever waits in line gets ``SandboxError``."""
        self._closed = True
        for waiter in self._line:
            if not waiter.turn.done():
                waiter.turn.set_exception(SandboxError("the pool was closed"))
        self._line.clear()
        await self._setups.close()
        for box in list(self._leased):
            await self.release(box)
        for ready in self._warm.values():
            for box in ready:
                self._spawn(box.destroy())
        self._warm.clear()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._backend.close()
