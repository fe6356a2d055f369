"""Makes boxes through an engine: a container is started, handed the runner, and looked at from within."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import platform
import secrets
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lehr.core.errors import HostUnfit, LehrError
from lehr.sandbox import boot, seccomp
from lehr.sandbox.base import Snapshot, Spec
from lehr.sandbox.channel import ChannelLost
from lehr.sandbox.container.box import Container, ContainerBox, unrecorded
from lehr.sandbox.container.carrier import Carrier
from lehr.sandbox.container.driver import Driver, Stream
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.frames import StreamChannel
from lehr.sandbox.zygote import INSIDE, PARTS, inside_source

OWN = ("relay", "contained")
READY_S = 20.0
STARVED_S = 5.0
CLOSE_S = 30.0
STARTERS, ENDERS = 16, 8
RETRIES_S = (0.5, 2.0, 5.0)
log = logging.getLogger(__name__)


class ContainerBackend:
    """Life cycle as any backend's: made anywhere, used in a running loop, ended by :meth:`close`.

    driver: what holds the containers. start_s: how long one may take to run.
    """

    def __init__(self, name: str, driver: Driver, *, start_s: float) -> None:
        self.name = name
        self._driver = driver
        self._start_s = start_s
        self._boxes: set[ContainerBox] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._begun: set[asyncio.Future[Stream]] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._connecting: asyncio.Future[None] | None = None
        self._opened = self._closed = self._ended = False
        self._starters = ThreadPoolExecutor(STARTERS, f"lehr-{name}-start")
        self._enders = ThreadPoolExecutor(ENDERS, f"lehr-{name}-end")

    async def create(
        self, spec: Spec, snapshot: Snapshot | None = None, *, ahead: bool = False
    ) -> ContainerBox:
        """Make a box, or raise ``MissingDependency`` / ``HostUnfit`` / ``SandboxError`` with the next step."""
        container, channel = await self.start(spec, snapshot)
        box = ContainerBox(spec, container, channel, self, own_kernel=self._driver.own_kernel)
        self._boxes.add(box)
        box.ended.add_done_callback(lambda _: self._boxes.discard(box))
        return box

    def check(self, spec: Spec, snapshot: Snapshot) -> None:
        """Raise ``SandboxError``: no box is restored from anything."""
        raise unrecorded()

    async def start(self, spec: Spec, snapshot: Snapshot | None = None) -> tuple[Container, StreamChannel]:
        """Start a container, ready to serve. If the caller is cancelled, what was begun is removed after it."""
        if snapshot is not None:
            raise unrecorded()
        if spec.allow_hosts:
            raise HostUnfit(
                f"boxes of the backend {self.name} reach no host",
                expected="no allowed hosts",
                hint="Use the backend bwrap, whose boxes can be allowed some.",
            )
        await self._open()
        name = f"lehr-{secrets.token_hex(8)}"
        stream = await self._launch(name, spec)
        container = Container(
            name, lambda: self._later(self._remove(name)), functools.partial(self._starved, name)
        )
        try:
            carrier = Carrier(stream, name)
        except BaseException:  # no descriptor is left, or no thread
            stream.close()
            container.kill()
            raise
        channel = StreamChannel(asyncio.get_running_loop(), carrier.ends)
        try:
            async with asyncio.timeout(READY_S):
                await self._settle(channel, spec)
            if self._closed:
                raise SandboxError("the backend is closed")
        except BaseException as error:
            channel.close()
            container.kill()
            if isinstance(error, ChannelLost | TimeoutError):
                said = stream.said.strip()[-600:]
                raise HostUnfit(
                    f"a container of {spec.image} started, but no box came up in it: "
                    f"{said or 'it ended without a word'}",
                    expected="an image with python3 of version 3.10 or later on the PATH",
                ) from error
            raise
        return container, channel

    async def _launch(self, name: str, spec: Spec) -> Stream:
        loop = asyncio.get_running_loop()
        argv = ("python3", "-E", "-c", boot.program(OWN[-1]))
        work = loop.run_in_executor(self._starters, self._driver.start, name, spec, argv)
        self._begun.add(work)
        work.add_done_callback(self._begun.discard)
        try:
            async with asyncio.timeout(self._start_s):
                return await asyncio.shield(work)
        except BaseException as error:
            self._later(self._undo(name, work))
            if isinstance(error, TimeoutError) and not isinstance(error, LehrError):
                raise SandboxError(
                    f"a container of {spec.image} did not start within {self._start_s:g} s",
                    hint=f"Look whether what runs the backend {self.name} is overloaded",
                ) from error
            raise

    async def _undo(self, name: str, work: asyncio.Future[Stream]) -> None:
        """Remove what a call began that was given up or failed, once it is over."""
        self._driver.give_up(name)
        await asyncio.wait([work])
        if not work.cancelled() and work.exception() is None:
            work.result().close()
        await self._remove(name)

    async def _settle(self, channel: StreamChannel, spec: Spec) -> None:
        """Hand the runner over, and tell it what box it is."""
        await boot.load(channel, inside_source(OWN))
        _, ready = channel.expect(0)
        limits, own_kernel = spec.limits, self._driver.own_kernel
        filters = (seccomp.in_user_space(),) if own_kernel else seccomp.programs(limited=True)
        channel.post(
            {
                "filters": [program.hex() for program in filters],
                "hidden": [*INSIDE, *(f"{INSIDE[-1]}.{name}" for name in (*PARTS, *OWN))],
                "machine": platform.machine(),
                "own_kernel": own_kernel,
                "alone": self._driver.alone,
                "memory_bytes": limits.memory_bytes,
                "pids": limits.pids,
                "cpu_s": limits.cpu_s,
            }
        )
        answer = await ready
        if "error" in answer.header:
            raise HostUnfit(
                f"the container is no box: {answer.header['error']}",
                expected="an engine that isolates as it is asked to",
            )

    # --- ends

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _remove(self, name: str) -> None:
        """Remove a container, pressing harder if need be; the next start of an owner removes what is left."""
        loop = asyncio.get_running_loop()
        for wait_s in (*RETRIES_S, None):
            try:
                return await loop.run_in_executor(self._enders, self._driver.remove, name)
            except (LehrError, RuntimeError) as error:  # RuntimeError: the threads have ended
                if wait_s is None or not isinstance(error, LehrError):
                    log.warning("container %s is left behind, to be removed by a later start: %s", name, error)
                    return
            await asyncio.sleep(wait_s)

    async def _starved(self, name: str) -> bool:
        work = asyncio.get_running_loop().run_in_executor(self._enders, self._driver.starved, name)
        try:
            async with asyncio.timeout(STARVED_S):
                return await work
        except (LehrError, TimeoutError):
            return False

    # --- the driver

    async def _open(self) -> None:
        """Once: connect, remove what is orphaned, and begin to say that this owner lives."""
        async with self._opening:
            if self._closed:
                raise SandboxError("the backend is closed")
            if not self._opened:
                loop = asyncio.get_running_loop()
                if self._connecting is None:
                    self._connecting = loop.run_in_executor(self._starters, self._driver.open)
                work = self._connecting
                try:
                    await asyncio.shield(work)
                finally:
                    if work.done():  # else the caller was cancelled, and the next one waits for the same
                        self._connecting = None
                self._opened = True
                if self._driver.renew_s:
                    self._renewing = loop.create_task(self._renew())

    async def _renew(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._driver.renew_s)
            try:
                await loop.run_in_executor(self._enders, self._driver.renew)
            except LehrError as error:
                log.warning("%s; others will take the boxes of this process for orphans if that lasts", error)

    async def close(self) -> None:
        """Destroy every box that is left. Idempotent, bounded in time."""
        self._closed = True
        await asyncio.gather(*(box.destroy() for box in list(self._boxes)))
        async with self._opening:
            if self._renewing is not None:
                self._renewing.cancel()
                await asyncio.wait([self._renewing])
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    if self._connecting is not None:
                        await asyncio.wait([self._connecting])
                        self._connecting.exception()
                    while left := [*self._begun, *self._tasks]:
                        await asyncio.wait(left)
            if not self._ended:
                self._ended = True
                await asyncio.get_running_loop().run_in_executor(self._enders, self._driver.close)
        for threads in (self._starters, self._enders):
            threads.shutdown(wait=False)
