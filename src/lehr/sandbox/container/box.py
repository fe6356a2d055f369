"""A box that is a container of an engine: it has no group and no process on this host, only a name there."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence

from lehr.core.errors import LehrError
from lehr.sandbox.base import ExecResult, Snapshot, Spec
from lehr.sandbox.box import Maker
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.frames import StreamChannel
from lehr.sandbox.launch import Process
from lehr.sandbox.relayed import RelayedBox

GONE_S = 10.0
UNUSED_RLIMITS = ("AS", "NPROC")
"""Address space is no measure of memory, and the users of all boxes of an engine are one user to its kernel."""
REFUSED_RLIMITS = ("RTPRIO", "NICE", "MSGQUEUE", "CPU")
"""Those that gVisor does not have or counts otherwise."""


class Container(Process):
    """What an engine holds for a box. Killing removes it.

    remove: ends it, called once. starved: whether the engine ended it for want of memory.
    """

    def __init__(
        self, name: str, remove: Callable[[], asyncio.Future[None]], starved: Callable[[], Awaitable[bool]]
    ) -> None:
        self.name = name
        self.group = None
        self.starved = starved
        self._remove = remove
        self._removed: asyncio.Future[None] | None = None

    def kill(self) -> None:
        """Begin to remove it. Idempotent."""
        if self._removed is None:
            self._removed = self._remove()

    async def gone(self) -> None:
        """Wait until it is removed, but not for ever: the backend goes on trying."""
        self.kill()
        if self._removed is not None:
            await asyncio.wait([self._removed], timeout=GONE_S)


class ContainerBox(RelayedBox):
    """Life cycle as any box's.

    own_kernel: whether it is gVisor's, which has other rlimits.
    """

    def __init__(
        self, spec: Spec, container: Container, channel: StreamChannel, maker: Maker, *, own_kernel: bool
    ) -> None:
        super().__init__(spec, container, channel, maker)
        self._unused = UNUSED_RLIMITS + (REFUSED_RLIMITS if own_kernel else ())

    def rlimits(self) -> dict[str, tuple[int, int]]:
        """Return the limits of each single process, as far as they mean something here."""
        return {name: value for name, value in super().rlimits().items() if name not in self._unused}

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        timeout_s: float | None = None,
    ) -> ExecResult:
        """Run a program to its end; see the protocol. A box that ended is asked after at its engine."""
        process = self._process
        result = await super().exec(argv, stdin=stdin, env=env, cwd=cwd, timeout_s=timeout_s)
        if result.verdict == "broken" and isinstance(process, Container) and await process.starved():
            limit = (
                f"reached the limit of {self.spec.limits.memory_bytes >> 20} MiB of memory, and the box ended"
            )
            return dataclasses.replace(result, verdict="oom", detail=limit)
        return result

    async def snapshot(self, *, on_restore: Sequence[str] = ()) -> Snapshot:
        """Refuse: nothing of a container may mount layers, and its disk is memory that no engine commits."""
        raise unrecorded()

    async def restore(self, snapshot: Snapshot) -> None:
        """Refuse a snapshot, which is of another backend."""
        raise unrecorded()


def unrecorded() -> LehrError:
    """Return the error for a state that cannot be recorded or brought back."""
    return SandboxError(
        "a box in a container cannot be recorded",
        expected="the backend bwrap, which records the disk, or gvisor, which records memory too",
        hint="Or keep what matters with `box.tree()`, and write it into the next box",
    )
