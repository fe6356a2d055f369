"""The host's side of a box's processes: started inside their cgroup, killed and waited for as one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from lehr.core.errors import MissingDependency
from lehr.sandbox.cgroup import Group

JOIN = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo 0 >"$1" || exit 96; shift; n=$((n-1)); done; exec "$@"'
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


FIRST_UID, UIDS = 0x7000_0000, 1 << 24
"""Host user numbers of boxes when started by root: beyond every range that systemd or subuid hand out."""


def as_box_user() -> list[str]:
    """Return the command prefix that gives up root for a user number of its own; empty for other users."""
    if os.geteuid() != 0:
        return []
    spans = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    inside, _, count = max(spans, key=lambda span: span[2])
    if inside + count > FIRST_UID + UIDS:
        uid = FIRST_UID + secrets.randbelow(UIDS)
    elif count > 2:  # root of a user namespace: the upper half of what was mapped to it
        uid = inside + count // 2 + secrets.randbelow(count // 2)
    else:
        return []
    program = shutil.which("setpriv", path=PATH)
    if program is None:
        raise MissingDependency("setpriv is not installed", hint="Install it: `apt-get install util-linux`")
    return [program, "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--"]


class Process:
    """bubblewrap and all that runs below it. Killing process 1 of the box kills everything in it."""

    def __init__(self, argv: Sequence[str], group: Group | None, fds: Sequence[int]) -> None:
        self.group = group
        self.errors_kept = ""
        self._info, info_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        command = [part.replace("INFO", str(info_write)) if part == "INFO" else part for part in argv]
        if group:
            command = ["/bin/sh", "-c", JOIN, "join", str(len(group.doors)), *group.doors, *command]
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[*fds, info_write],
                env={"PATH": PATH},
                cwd="/",
            )
        except BaseException:
            os.close(self._info)
            os.close(self._errors)
            raise
        finally:
            os.close(info_write)
        self._inner = -1
        self._dead = False
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._outer = os.pidfd_open(self._popen.pid)
        self._loop.add_reader(self._outer, self._on_end)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._outer)
        os.close(self._outer)
        self._outer = -1
        if not self._ended.done():
            self._ended.set_result(self._popen.wait())

    @property
    def ended(self) -> asyncio.Future[int]:
        """Resolves to bubblewrap's status when the last process of the box is gone."""
        return self._ended

    def errors(self) -> str:
        """Return what bubblewrap complained about."""
        if self._errors < 0:
            return self.errors_kept
        return os.pread(self._errors, 4096, 0).decode("utf-8", "replace").strip()

    def adopt(self) -> None:
        """Learn the host's number of the box's process 1. Called once the box is ready."""
        with contextlib.suppress(OSError, ValueError, KeyError):
            child = json.loads(os.read(self._info, 4096))["child-pid"]
            self._inner = os.pidfd_open(child)

    def kill(self) -> None:
        """Kill all of it at once. Idempotent; returns before everything is gone."""
        if self._dead:
            return
        self._dead = True
        if self._inner < 0:
            self.adopt()
        if self._inner >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                signal.pidfd_send_signal(self._inner, signal.SIGKILL)
        elif self._outer >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._outer, signal.SIGKILL)

    async def gone(self, limit_s: float = 2.0) -> None:
        """Wait until nothing is left, pressing harder if need be, and remove the cgroup."""
        for _ in range(2):
            await asyncio.wait([self._ended], timeout=limit_s / 2)
            if self._ended.done():
                break
            if self.group:
                self.group.kill()
            elif self._outer >= 0:
                signal.pidfd_send_signal(self._outer, signal.SIGKILL)
        self.errors_kept = self.errors_kept or self.errors()
        for fd in (self._inner, self._info, self._errors):
            if fd >= 0:
                os.close(fd)
        self._inner = self._info = self._errors = -1
        if self.group:
            self.group.remove()
