"""Roles as processes of this machine.

Each role is a fresh interpreter that runs ``lehr.cluster.child``: it gets its config over stdin, dials
home, builds its service and answers. Its output goes to ``<folder>/logs/<role>.log``. It runs in a
process group of its own, so that Ctrl-C reaches the orchestrator alone, which then ends it politely; and
the kernel kills it when the orchestrator dies, however that happens (to be exact: when the thread that
started it does, so start roles from a thread that lives as long as they do).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from lehr.cluster.base import Event, Role
from lehr.cluster.child import Start
from lehr.core.errors import ConfigError, LehrError, OutOfSpace, RoleLost
from lehr.core.threads import share_cores
from lehr.wire.codec import encode
from lehr.wire.home import Home, Peer
from lehr.wire.message import Bye

POLITE_S = 5.0
FORCE_S = 5.0
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


class LocalHandle:
    """A started role; see ``cluster.base.Handle``."""

    def __init__(self, role: Role, peer: Peer, process: asyncio.subprocess.Process, log: Path) -> None:
        self.role = role
        self.pid = process.pid
        self.log = log
        self._peer = peer
        self._process = process

    @property
    def incarnation(self) -> int:
        """How many times a role of this name has been started."""
        return self._peer.incarnation

    @property
    def alive(self) -> bool:
        """Whether calls can still be answered."""
        return not self._peer.ended.done()

    async def call(self, method: str, body: Any = None, *, returns: Any = None, timeout_s: float = 60.0) -> Any:
        """Send a request and return its answer; see ``cluster.base.Handle.call``."""
        return await self._peer.call(method, body, returns=returns, timeout_s=timeout_s)


class _Started:
    def __init__(self, peer: Peer, process: asyncio.subprocess.Process) -> None:
        self.peer = peer
        self.process = process
        self.watcher: asyncio.Task[None] | None = None

    def kill(self, number: int) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class LocalCluster:
    """Starts roles on this machine. Make it inside a running loop; :meth:`close` it in the same one."""

    def __init__(self, folder: Path) -> None:
        self._logs = folder / "logs"
        try:
            self._logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno == 28:
                raise OutOfSpace(f"no space left for {self._logs}") from error
            raise
        self._home = Home(on_silent=self._silent)
        self._started: dict[str, _Started] = {}
        self._incarnations: dict[str, int] = {}
        self._events: list[Event] = []
        self._waiters: list[asyncio.Future[None]] = []
        self._closed = False
        self._closing = False

    async def start(self, role: Role, *, timeout_s: float = 120.0) -> LocalHandle:
        """Start a process and wait until it serves.

        Raises the error with which its service could not be built, ``DeadlineExceeded``, or ``RoleLost``
        with the end of its log.
        """
        if self._closing:
            raise ConfigError("this cluster is closed")
        running = self._started.get(role.name)
        if running is not None and running.process.returncode is None:
            raise ConfigError(f"role {role.name!r} is running already", hint="Give each role its own name.")
        incarnation = self._incarnations[role.name] = self._incarnations.get(role.name, 0) + 1
        token = secrets.token_hex(32)
        peer = self._home.expect(role.name, incarnation, token)
        log = self._logs / f"{role.name.replace('/', '.')}.log"
        start = Start(role, self._home.address, token, incarnation, os.getpid())
        try:
            process = await self._spawn(role, log)
        except BaseException:
            peer.lose("it could not be started")
            raise
        started = self._started[role.name] = _Started(peer, process)
        started.watcher = asyncio.create_task(self._watch_process(role, started, log))
        try:
            await self._hand_over(process, encode(start))
            await peer.ready(timeout_s)
        except BaseException as error:
            started.kill(signal.SIGKILL)
            await asyncio.shield(started.watcher)
            if isinstance(error, RoleLost):
                raise RoleLost(f"{error.what}{_tail(log)}") from error
            raise
        self._tell(Event(role.name, "ready", incarnation))
        return LocalHandle(role, peer, process, log)

    async def watch(self) -> AsyncIterator[Event]:
        """Yield every event since the cluster was made, then each new one, until it is closed."""
        seen = 0
        while True:
            if seen < len(self._events):
                seen += 1
                yield self._events[seen - 1]
            elif self._closed:
                return
            else:
                await self._next_event()

    async def close(self) -> None:
        """End every role: politely, by signal after ``POLITE_S``, within ``POLITE_S + FORCE_S``. Idempotent.

        A role that is still being built is killed; whoever waits for it gets ``RoleLost``.
        """
        if self._closing:
            return
        self._closing = True
        watchers = [s.watcher for s in self._started.values() if s.watcher is not None]
        alive = [s for s in self._started.values() if s.process.returncode is None]
        for started in alive:
            if not started.peer.is_ready:
                started.kill(signal.SIGKILL)
            with contextlib.suppress(LehrError):
                await started.peer.send(Bye())
        if watchers:
            await asyncio.wait(watchers, timeout=POLITE_S)
        for started in alive:
            started.kill(signal.SIGKILL)
        if watchers:
            await asyncio.wait(watchers, timeout=FORCE_S)
        await self._home.close()
        self._closed = True
        self._wake_watchers()

    async def _spawn(self, role: Role, log: Path) -> asyncio.subprocess.Process:
        environment = dict(os.environ)
        environment.update(dict.fromkeys(_THREAD_VARIABLES, str(role.threads)))
        share_cores(environment)
        environment["PYTHONUNBUFFERED"] = "1"
        with log.open("ab") as out:
            out.write(f"--- {role.name} started {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            out.flush()
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "lehr.cluster.child",
                stdin=asyncio.subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
            )

    async def _hand_over(self, process: asyncio.subprocess.Process, data: bytes) -> None:
        if process.stdin is None:
            return
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # told by the watcher
            process.stdin.write(data)
            await process.stdin.drain()
            process.stdin.close()
            await process.stdin.wait_closed()

    async def _watch_process(self, role: Role, started: _Started, log: Path) -> None:
        status = await started.process.wait()
        if not started.peer.is_ready:
            await asyncio.sleep(0.05)  # the reason that it gave may still be on its way
        ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(started.process.pid, signal.SIGKILL)  # whatever it had started itself
        detail = f"its process {started.process.pid} was {ended}" if status < 0 else f"its process {ended}"
        if self._closing:
            started.peer.lose("the cluster was closed")
            return
        started.peer.lose(f"{detail}; its log is {log}")
        self._tell(Event(role.name, "lost", started.peer.incarnation, f"{detail}{_tail(log)}"))

    def _silent(self, peer: Peer) -> None:
        started = self._started.get(peer.name)
        if started is not None and started.peer is peer:
            started.kill(signal.SIGKILL)

    def _tell(self, event: Event) -> None:
        self._events.append(event)
        self._wake_watchers()

    async def _next_event(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake_watchers(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _tail(log: Path, lines: int = 20) -> str:
    """Return the last lines of a log, on lines of their own."""
    try:
        with log.open(errors="replace") as text:
            kept = deque(text, maxlen=lines)
    except OSError:
        return ""
    return "\n" + "".join(kept).rstrip() if kept else ""
