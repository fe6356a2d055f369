"""The host's processes of one box on gVisor, and the control group around them."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

from lehr.sandbox.base import Limits
from lehr.sandbox.cgroup import Group
from lehr.sandbox.gvisor import runsc
from lehr.sandbox.launch import GONE_S, Handle, Process

OWN_BYTES = 256 << 20
"""What gVisor's kernel and its file server may take on top of a box's memory."""
OWN_PIDS = 256
TASKS = 16
"""Host threads and processes that one process inside may stand for."""


def around(limits: Limits) -> tuple[int, int]:
    """Return the bytes and processes of the group around a box: programs are held to theirs from within."""
    return limits.memory_bytes + limits.disk_bytes + OWN_BYTES, TASKS * limits.pids + OWN_PIDS


class Sandbox(Process):
    """runsc's processes for one box. Killing the first kills every program; the others follow.

    folder: what runsc keeps about it, removed at the end. name: of the container.
    """

    def __init__(self, pid: int, group: Group | None, folder: Path, name: str) -> None:
        self.group = group
        self.folder = folder
        self.name = name
        self._handle = Handle(os.pidfd_open(pid), runsc.reaper(pid))

    async def left(self, limit_s: float) -> bool:
        """Wait until it has ended by itself."""
        await asyncio.wait([self._handle.ended], timeout=limit_s)
        return self._handle.ended.done()

    def replace(self, pid: int, folder: Path, name: str) -> None:
        """Stand for another process, in the same group, now that the old one has ended."""
        old = self.folder
        self.folder, self.name = folder, name
        self._handle = Handle(os.pidfd_open(pid), runsc.reaper(pid))
        shutil.rmtree(old, ignore_errors=True)

    async def gone(self) -> None:
        """Wait until nothing is left, and remove the group and the folder. Bounded in time."""
        await self._handle.end(GONE_S)
        self._handle.abandon()
        await asyncio.to_thread(self._clear)

    def _clear(self) -> None:
        if self.group:
            self.group.kill()
            shutil.rmtree(self.folder, ignore_errors=True)
            self.group.remove()
        else:
            runsc.clear(self.folder)
