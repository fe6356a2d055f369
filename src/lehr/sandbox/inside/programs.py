"""Starting a program as a child of process 1, and looking at what runs in the box."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

from lehr.sandbox.inside import rights, script

TARGETS = (0, 1, 2, 8, 9)
TELL = 3
TIOCSCTTY = 0x540E
FIRST_FREE = 16
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


class Spent(NamedTuple):
    """What ended programs have used: seconds, and bytes that they read and wrote through system calls."""

    user_s: float
    system_s: float
    read_bytes: int
    written_bytes: int

    @property
    def cpu_s(self) -> float:
        """CPU seconds."""
        return self.user_s + self.system_s

    def since(self, before: Spent) -> dict[str, Any]:
        """Return the differences, by name."""
        return {name: now - then for name, now, then in zip(self._fields, self, before, strict=True)}


class Exec:
    """A program that was started and has not been reported yet."""

    def __init__(self, request: dict[str, Any], pid: int, before: Spent) -> None:
        self.id: int = request["id"]
        self.pid = pid
        self.shell: bool = request.get("shell", False)
        self.before = before
        self.peak_bytes = 0
        self.peak_pids = 1
        self.ended_by = ""


def start(request: dict[str, Any], fds: list[int], before: Spent, *, apart: bool) -> Exec | script.Script:
    """Fork and become the program; returns once it runs, or has said why it cannot.

    Returns a script only in the fork, which is to run it once everything of the runner is off its stack.
    """
    plan = None
    if not request.get("shell"):
        plan = script.understand(request["argv"], request["env"], request["base_env"])
    told, tell = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
    except OSError:
        os.close(told)
        os.close(tell)
        raise
    if pid == 0:
        return _child(request, fds, tell, plan, apart)
    os.close(tell)
    done = Exec(request, pid, before)
    report = os.read(told, 4)
    os.close(told)
    if report:
        done.ended_by = f"start:{struct.unpack('!i', report)[0]}"
    return done


def _child(
    request: dict[str, Any], fds: list[int], tell: int, plan: script.Invocation | None, apart: bool
) -> script.Script:
    try:
        _become(request, fds, tell, apart)
        if plan is not None and (ready := script.load(plan, request["env"])) is not None:
            os.close(TELL)
            return ready
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except OSError as error:
        os.write(TELL, struct.pack("!i", error.errno or errno.EIO))
    except ValueError:
        os.write(TELL, struct.pack("!i", errno.EINVAL))
    os._exit(127)


def _become(request: dict[str, Any], fds: list[int], tell: int, apart: bool) -> None:
    os.setsid()
    signal.set_wakeup_fd(-1)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for fd in [*fds, tell]]
    for source, target in zip(high, TARGETS[: len(fds)], strict=False):
        os.dup2(source, target, inheritable=True)
    os.dup2(high[-1], TELL, inheritable=False)
    rights.close_all_but({*TARGETS[: len(fds)], TELL})
    for name, wanted in request["rlimits"].items():
        kind = getattr(resource, "RLIMIT_" + name)
        hard = resource.getrlimit(kind)[1]
        soft, top = (value if hard == resource.RLIM_INFINITY else min(value, hard) for value in wanted)
        resource.setrlimit(kind, (soft, top))
    if request.get("terminal"):
        fcntl.ioctl(0, TIOCSCTTY, 0)
    os.nice(request["nice"])
    os.umask(0o022)
    rights.become_candidate(apart=apart)
    os.chdir(os.path.join("/work", request["cwd"]))
    score = os.open("/proc/self/oom_score_adj", os.O_WRONLY | os.O_CLOEXEC)
    os.write(score, b"1000")
    os.close(score)


class Load(NamedTuple):
    """What runs in the box besides process 1."""

    threads: int
    bytes: int
    cpu_s: float


def processes() -> list[int]:
    """Return the numbers of everything that runs in the box."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stat_of(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` after the name, or none if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as handle:
            return handle.read().rpartition(")")[2].split()
    except OSError:
        return []


def load() -> Load:
    """Add up threads, resident bytes and CPU seconds of all programs that are alive."""
    threads, total, cpu_s = 0, 0, 0.0
    for pid in processes():
        fields = stat_of(pid) if pid != 1 else []
        if fields:
            threads += int(fields[17])
            cpu_s += sum(map(int, fields[11:15])) / TICKS
            total += int(fields[21]) * PAGE
    return Load(threads, total, cpu_s)


def shared_out() -> int:
    """Return the bytes of all programs, shared pages divided among their users; slower than ``load``."""
    total = 0
    for pid in processes():
        try:
            with open(f"/proc/{pid}/smaps_rollup") as handle:
                total += sum(int(line.split()[1]) << 10 for line in handle if line.startswith("Pss:"))
        except OSError:
            continue
    return total


def descendants(roots: Iterable[int]) -> set[int]:
    """Return ``roots`` and everything below them."""
    parents = {pid: int(fields[1]) for pid in processes() if (fields := stat_of(pid))}
    found = set(roots)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found
