"""Driving ``runsc``: which binary and platform, one bounded call after the other, folders of state."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from lehr.core.errors import HostUnfit, MissingDependency
from lehr.sandbox.cgroup import Group
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.launch import PATH, Handle
from lehr.sandbox.owner import owner, owner_ended

CALL_S = 30.0
PROBE_S = 10.0
SAID_BYTES = 600
INSTALL = (
    "Install it: `apt-get install runsc`, or a current release from https://gvisor.dev/docs/user_guide/install"
)
ENTER = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 125; shift; done; shift; exec "$@"'
"""Join the groups whose doors come before ``--``, then become the command behind it."""
_numbers = itertools.count()


def find(program: str | None = None) -> str:
    """Return the path of runsc, or raise ``MissingDependency`` with the command that installs it."""
    found = shutil.which(program or "runsc") or shutil.which(program or "runsc", path=PATH)
    if found is None:
        raise MissingDependency("gVisor (runsc) is not installed", hint=INSTALL)
    return found


def platform(flags: str) -> str:
    """Return the platform to ask for, from the text of ``runsc flags``: systrap where this runsc has it.

    Older ones default to ptrace, slower and everywhere; kvm is never chosen, as it needs the machine's own.
    """
    _, _, after = flags.partition("\n  -platform ")
    return "systrap" if "systrap" in after.partition("\n  -")[0] else "ptrace"


@functools.cache
def options(program: str) -> tuple[str, ...]:
    """Return the flags that every call carries, or raise ``HostUnfit`` if the program is not a runsc."""
    try:
        done = subprocess.run([program, "flags"], capture_output=True, text=True, timeout=PROBE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostUnfit(f"{program} does not run: {error}", hint=INSTALL) from error
    said = done.stdout + done.stderr
    if "\n  -platform " not in said:
        raise HostUnfit(f"{program} is no runsc: {said.strip()[-200:]}", hint=INSTALL)
    flags = [f"--platform={platform(said)}", "--network=none", "--ignore-cgroups"]
    if "\n  -overlay2 " in said:
        flags.append("--overlay2=none")
    return (*flags, *(() if os.geteuid() == 0 else ("--rootless",)))


# --- state


def state_folder() -> Path:
    """Make a private folder for one backend, after removing what killed owners left. On disk, not in memory."""
    parent = Path("/var/tmp")
    if not os.access(parent, os.W_OK | os.X_OK):
        parent = Path(tempfile.gettempdir())
    base = parent / f"lehr-runsc-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    info = base.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o077:
        raise HostUnfit(
            f"{base} is not a private folder of this user", hint=f"Remove it: `rm -r {base}`, or chmod it 700"
        )
    sweep(base)
    folder = base / f"{owner()}-{next(_numbers)}"
    folder.mkdir(mode=0o700)
    return folder


def sweep(base: Path) -> int:
    """Kill and remove what belongs to owners that no longer live; return how many folders."""
    orphans = [folder for folder in base.iterdir() if owner_ended(folder.name)]
    for folder in orphans:
        clear(folder)
    return len(orphans)


def clear(folder: Path) -> None:
    """Kill the runsc processes that work in ``folder`` and remove it."""
    for pid in _working_in(folder):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _working_in(folder: Path) -> list[int]:
    """Return the processes that were started with a path below ``folder``."""
    found: list[int] = []
    needle = os.fsencode(folder) + b"/"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if needle in (entry / "cmdline").read_bytes() and int(entry.name) != os.getpid():
                    found.append(int(entry.name))
    return found


# --- calls


class Call:
    """One run of the binary. What it starts joins ``group``."""

    def __init__(
        self, argv: Sequence[str], said: Path, group: Group | None, stdin: int = -1, stdout: int = -1
    ) -> None:
        null = subprocess.DEVNULL
        if group is not None:
            argv = ["/bin/sh", "-c", ENTER, "sh", *group.doors, "--", *argv]
        with said.open("ab") as errors:
            self._popen = subprocess.Popen(
                argv,
                stdin=null if stdin < 0 else stdin,
                stdout=null if stdout < 0 else stdout,
                stderr=errors,
                env={"PATH": PATH},
                cwd="/",
                start_new_session=True,
            )
        self._handle = Handle(os.pidfd_open(self._popen.pid), self._popen.wait)

    async def status(self, limit_s: float) -> int | None:
        """Wait for its end; None if it ran past the limit and was killed. A cancelled caller kills it."""
        try:
            await asyncio.wait([self._handle.ended], timeout=limit_s)
            return self._popen.returncode if self._handle.ended.done() else None
        finally:
            if not self._handle.ended.done():
                await asyncio.shield(asyncio.ensure_future(self._handle.end()))


class Runsc:
    """The binary with the flags and the bundle of one backend.

    restores: whether it may; runsc refuses to when rootless.
    """

    def __init__(self, program: str, bundle: Path) -> None:
        self._base = (program, *options(program))
        self.restores = "--rootless" not in self._base
        self._bundle = bundle

    async def start(
        self, folder: Path, name: str, ends: tuple[int, int], group: Group | None, image: Path | None
    ) -> int:
        """Start a container with standard input and output ``ends``; return its sandbox's process.

        image: a recorded state to start from. Raises ``HostUnfit`` or ``SandboxError`` with what runsc said.
        """
        pid = folder / "pid"
        kind = ["run"] if image is None else ["restore", "--image-path", str(image)]
        rest = ["--detach", "--bundle", str(self._bundle), "--pid-file", str(pid), name]
        await self._call(folder, [*kind, *rest], group, *ends)
        return int(pid.read_text())

    async def checkpoint(self, folder: Path, name: str, image: Path) -> None:
        """Record a container's state; it ends with that."""
        await self._call(folder, ["checkpoint", "--image-path", str(image), name], None)

    async def _call(
        self, folder: Path, args: Sequence[str], group: Group | None, stdin: int = -1, stdout: int = -1
    ) -> None:
        said = folder / "said"
        call = Call([*self._base, "--root", str(folder / "root"), *args], said, group, stdin, stdout)
        status = await call.status(CALL_S)
        if status != 0:
            how = "did not end in time" if status is None else f"ended with status {status}"
            words = said.read_bytes()[-SAID_BYTES:].decode("utf-8", "replace").strip()
            raise SandboxError(f"runsc {args[0]} {how}: {words}", hint=f"Look into it: `{self._base[0]} help`")


def reaper(pid: int) -> Callable[[], None]:
    """Return what collects a process that was handed to this one, if it was."""

    def reap() -> None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)

    return reap
