"""Processes that the host holds: bubblewrap with a zygote below it, and process 1 of each box."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from lehr.sandbox.base import Spec
from lehr.sandbox.cgroup import Group
from lehr.sandbox.egress import Egress
from lehr.sandbox.refusals import Refusals

if TYPE_CHECKING:
    from lehr.sandbox.zygote import Layers

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
GONE_S = 2.0


class Server:
    """bubblewrap and all that runs below it. user: the number to run it as, None for this process's own."""

    def __init__(self, argv: Sequence[str], fds: Sequence[int], user: int | None) -> None:
        self._errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        try:
            self._popen = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=fds,
                env={"PATH": PATH},
                cwd="/",
                user=user,
                group=user,
                extra_groups=None if user is None else [],
            )
        except BaseException:
            os.close(self._errors)
            raise
        self._handle = Handle(os.pidfd_open(self._popen.pid), self._popen.wait)

    @property
    def said(self) -> str:
        """What it complained about."""
        return os.pread(self._errors, 4096, 0).decode("utf-8", "replace").strip() if self._errors >= 0 else ""

    async def close(self, patience_s: float = 0.0) -> None:
        """End it, after it had the time to end by itself. Idempotent."""
        if patience_s:
            await asyncio.wait([self._handle.ended], timeout=patience_s)
        await self._handle.end()
        if self._errors >= 0:
            os.close(self._errors)
            self._errors = -1


class Handle:
    """A process by its pidfd, which is owned. ``reap`` is called once it has ended."""

    def __init__(self, pidfd: int, reap: Callable[[], object] = lambda: None) -> None:
        self._pidfd = pidfd
        self._reap = reap
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._on_end)

    def _on_end(self) -> None:
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
            self._reap()
            self.ended.set_result(None)

    def kill(self) -> None:
        """Kill it, without waiting. Idempotent."""
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def end(self, limit_s: float = GONE_S) -> bool:
        """Kill it and wait; False if it is still there."""
        self.kill()
        await asyncio.wait([self.ended], timeout=limit_s)
        return self.ended.done()

    def abandon(self) -> None:
        """Stop watching a process that will not end."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1


class Process:
    """Process 1 of a box, its control group and what it stands on. Killing process 1 kills everything in it."""

    refusals: Refusals | None = None
    egress: Egress | None = None

    def __init__(self, pidfd: int, group: Group | None, layers: Layers) -> None:
        self.group = group
        self.layers = layers
        self._handle = Handle(pidfd)

    def take(self, given: Mapping[str, int], spec: Spec) -> None:
        """Own and serve what process 1 gave: where the kernel asks about calls, and a proxy's socket."""
        if "notices" in given:
            self.refusals = Refusals(given["notices"])
        if "proxy" in given:
            listener = socket.socket(fileno=given["proxy"])
            self.egress = Egress(listener, spec.allow_hosts, spec.limits.network_bytes)

    @property
    def ended(self) -> asyncio.Future[None]:
        """Resolves when the last process of the box is gone."""
        return self._handle.ended

    def kill(self) -> None:
        """Kill all of it at once. Idempotent; returns before everything is gone."""
        self._handle.kill()

    async def gone(self) -> None:
        """Wait until nothing is left, pressing harder if need be, and remove the cgroup."""
        if not await self._handle.end(GONE_S / 2) and self.group:
            self.group.kill()
            await self._handle.end(GONE_S / 2)
        self._handle.abandon()
        for service in (self.refusals, self.egress):
            if service:
                service.close()
        if self.group:
            self.group.remove()
        self.layers.free()
