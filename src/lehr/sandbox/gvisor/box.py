"""A box on gVisor, and its recorded state: memory, processes and disk."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from lehr.sandbox.base import ExecResult, ExecUsage, Snapshot, Spec
from lehr.sandbox.box import Maker
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.frames import StreamChannel
from lehr.sandbox.gvisor.sandbox import Sandbox
from lehr.sandbox.relayed import RelayedBox
from lehr.sandbox.watch import Meter

UNUSED_RLIMITS = ("RTPRIO", "NICE", "MSGQUEUE", "AS", "CPU")
"""gVisor refuses to set the first three, and counts the time that a program waits for a processor as its own.
Address space is no measure of memory; the runner measures."""


class MemorySnapshot:
    """A recorded box: a folder on disk. Life cycle: made by ``box.snapshot()``, ended by :meth:`discard`."""

    kind: Literal["memory"] = "memory"

    def __init__(self, spec: Spec, image: Path, on_restore: Sequence[str] = ()) -> None:
        self.id = f"snapshot-{secrets.token_hex(6)}"
        self.spec = spec
        self.on_restore = tuple(on_restore)
        self.image = image

    @property
    def size_bytes(self) -> int:
        """What it takes on disk."""
        return sum(path.stat().st_blocks << 9 for path in self.image.glob("*"))

    async def discard(self) -> None:
        """Free the disk that it holds. Idempotent."""
        await asyncio.to_thread(shutil.rmtree, self.image, ignore_errors=True)


class Recorder(Maker, Protocol):
    """What records a box for it."""

    async def record(self, sandbox: Sandbox, channel: StreamChannel) -> Path:
        """Record a sandbox whose runner is held, and have it go on."""
        ...


class OuterMeter(Meter):
    """What a box used, by the group around gVisor. Its limits say nothing about single programs."""

    @property
    def limited(self) -> bool:
        """Whether a cgroup holds the limits of programs."""
        return False

    def lost_to_memory(self) -> bool:
        """Whether the kernel has ended a part of gVisor."""
        return self.oom_kills() > 0

    def refused_pids(self) -> int:
        """Forks that were refused to gVisor, not to a program."""
        return 0

    def usage(self, header: Mapping[str, Any], wall_s: float) -> ExecUsage:
        """Return what the exec used: memory and processes as gVisor counts them, time as the host does."""
        usage = super().usage(header, wall_s)
        peaks = {"peak_bytes": header.get("peak_bytes", 0), "peak_pids": header.get("peak_pids", 0)}
        told_apart = {} if self.cpu_s() is None else {"user_s": 0.0, "system_s": 0.0}
        return dataclasses.replace(usage, **peaks, **told_apart)


class GvisorBox(RelayedBox):
    """Life cycle as any box's. Each box has a sandbox, a folder of state and a control group of its own."""

    def __init__(self, spec: Spec, sandbox: Sandbox, channel: StreamChannel, maker: Recorder) -> None:
        super().__init__(spec, sandbox, channel, maker)
        self._recorder = maker

    @property
    def nice(self) -> int:
        """GVisor's scheduler is the host's."""
        return 0

    def meter(self) -> Meter:
        """Start to count what the next program uses."""
        return OuterMeter(self._process)

    def rlimits(self) -> dict[str, tuple[int, int]]:
        """Return the limits of each single process, as far as gVisor has them."""
        return {name: value for name, value in super().rlimits().items() if name not in UNUSED_RLIMITS}

    async def snapshot(self, *, on_restore: Sequence[str] = ()) -> Snapshot:
        """Record the box with everything that runs in it; shells go on after."""
        work = self._loop.create_task(self._snapshot(on_restore))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):
                await (await work).discard()
            raise

    async def _snapshot(self, on_restore: Sequence[str]) -> MemorySnapshot:
        sandbox, channel = self._process, self._channel
        if not isinstance(sandbox, Sandbox) or not isinstance(channel, StreamChannel):
            raise SandboxError("cannot record a box that is not gVisor's")
        async with self._turn:
            return MemorySnapshot(self.spec, await self._recorder.record(sandbox, channel), on_restore)

    def interrupt(self, number: int, *, children: bool = False) -> None:
        """Ask the runner to end an exec; end the box if the kernel has ended a part of it, as it may hang."""
        group = self._process.group
        if group and group.oom_kills():
            self.give_up()
        else:
            super().interrupt(number, children=children)

    def _result(
        self, header: dict[str, Any], reason: str, meter: Meter, wall: float, wall_s: float,
        output: tuple[bytes, bytes], truncated: bool, program: str,
    ) -> ExecResult:  # fmt: skip
        if meter.oom_kills() and not self.broken:
            self.give_up()  # what is left of it cannot be relied on
        return super()._result(header, reason, meter, wall, wall_s, output, truncated, program)
