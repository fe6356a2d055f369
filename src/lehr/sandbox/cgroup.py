"""The control group of one box: its limits, its weight beside others, and what it has used."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

from lehr.sandbox.base import Limits
from lehr.sandbox.owner import owner
from lehr.sandbox.places import Places, kill_members, remove

ALLOWANCE_BYTES = 8 << 20
"""Memory of the box's own process, on top of what the program may use."""
OWN_PIDS = 2
"""The runner, and room for one that is being reaped."""
PERIOD_US = 100_000
SHARES = 1024
"""What a thread weighs beside others."""
BOXES_SHARES = SHARES // 2
"""What all boxes of this process weigh together, on each core, in version 1."""
PATIENT = {1: 1 / 32, 2: 1 / 4}
"""How much a program weighs that has computed for a while, beside one that has just begun, by the version of
control groups. In version 1 only boxes yield by it, since they share a group; there a kernel from 5.15 on also
lets what has just begun go before it at once (``cpu.idle``)."""
CROWD = 8
"""Threads of a box from which on it is kept off one core once it has computed for a while."""
_numbers = itertools.count()


class Group:
    """The control group of one box. Made before the box, removed after it.

    Where CPU time is weighed by version 1, all boxes of this process are in one group there, which weighs
    half as much as a thread per core: however many they are, the host and its engines keep their part.
    """

    def __init__(self, places: Places, limits: Limits, *, hurried: bool = True) -> None:
        name = f"{owner()}-{next(_numbers)}"
        self._hurried = hurried
        self._cpu = limits.cpu
        self._confined = False
        self._v1: dict[str, Path] = {}
        self._v2: dict[str, Path] = {}
        cpu = places.controllers.get("cpu")
        self._siblings = cpu.folder / f"{owner()}-boxes" if cpu and cpu.version == 1 else None
        for controller, place in places.controllers.items():
            nested = self._siblings is not None and cpu is not None and place.folder == cpu.folder
            folder = self._siblings if nested and self._siblings else place.folder
            (self._v1 if place.version == 1 else self._v2)[controller] = folder / name
        self.folders = list(dict.fromkeys([*self._v2.values(), *self._v1.values()]))
        try:
            if self._siblings:
                self._siblings.mkdir(exist_ok=True)
                _write(self._siblings / "cpu.shares", BOXES_SHARES * len(os.sched_getaffinity(0)))
            for folder in self.folders:
                folder.mkdir()
            self._limit(limits)
        except OSError:
            self.remove()
            raise

    def _limit(self, limits: Limits) -> None:
        memory = str(limits.memory_bytes + ALLOWANCE_BYTES)
        pids = str(limits.pids + OWN_PIDS)
        self._quota = int(limits.cpu * PERIOD_US)
        if v1 := self._v1.get("memory"):
            (v1 / "memory.limit_in_bytes").write_text(memory)
            with contextlib.suppress(FileNotFoundError, PermissionError):
                (v1 / "memory.memsw.limit_in_bytes").write_text(memory)
        if v2 := self._v2.get("memory"):
            (v2 / "memory.max").write_text(memory)
            with contextlib.suppress(FileNotFoundError, PermissionError):
                (v2 / "memory.swap.max").write_text("0")
        if folder := self._v1.get("pids") or self._v2.get("pids"):
            (folder / "pids.max").write_text(pids)
        self._idles = "cpu" in self._v1 and (self._v1["cpu"] / "cpu.idle").exists()
        self._hold(True)
        if not self._hurried:
            self.hurry(False, anew=True)

    def throttle(self, on: bool) -> None:
        """Hold the box to its share of CPU time, or let it go first so that it can be ended without delay."""
        self._hold(on)
        self.hurry(True, anew=True)

    def _hold(self, on: bool) -> None:
        with contextlib.suppress(OSError):  # the box has gone
            if v1 := self._v1.get("cpu"):
                _write(v1 / "cpu.cfs_quota_us", self._quota if on else -1)
            if v2 := self._v2.get("cpu"):
                _write(v2 / "cpu.max", f"{self._quota if on else 'max'} {PERIOD_US}")

    def hurry(self, on: bool, *, anew: bool = False) -> None:
        """Let what has just begun go before neighbours that compute for long, or weigh it as any of them.

        anew: also if it is so already.
        """
        if on == self._hurried and not anew:
            return
        self._hurried = on
        if on and self._confined:
            self._confined = False
            self._pin(sorted(os.sched_getaffinity(0)))
        share = 1.0 if on else PATIENT[1 if self._siblings else 2]
        with contextlib.suppress(OSError):  # the box has gone
            if v1 := self._v1.get("cpu"):
                if self._idles:
                    _write(v1 / "cpu.idle", int(not on))
                else:
                    _write(v1 / "cpu.shares", int(SHARES * share))
            if v2 := self._v2.get("cpu"):
                _write(v2 / "cpu.weight", int(100 * share))

    def confine(self) -> None:
        """Keep a crowd off one core, so that what has just begun finds it free of forks and switches.

        Nothing is lost for the box where its share of CPU time fits on the other cores. A program may put
        itself back, until this is called again.
        """
        cores = sorted(os.sched_getaffinity(0))
        if self._cpu <= len(cores) - 1 and len(self._threads()) > CROWD:
            self._confined = True
            self._pin(cores[1:])

    def _pin(self, cores: list[int]) -> None:
        """Let every thread run on these cores only; those that begin meanwhile are found by looking again."""
        pinned: set[int] = set()
        while found := self._threads() - pinned:
            for thread in found:
                with contextlib.suppress(OSError):  # it has ended
                    os.sched_setaffinity(thread, cores)
            pinned |= found

    def _threads(self) -> set[int]:
        v1 = next(iter(self._v1.values()), None)
        v2 = next(iter(self._v2.values()), None)
        list_of = v1 / "tasks" if v1 else v2 / "cgroup.threads" if v2 else None
        try:
            return {int(thread) for thread in list_of.read_text().split()} if list_of else set()
        except OSError:  # the box has gone
            return set()

    @property
    def doors(self) -> list[str]:
        """The files into which a process of one thread writes 0 to join.

        Version 1 has ``tasks``, through which a thread moves itself without the lock that makes every other
        move wait for a grace period of the kernel (10 to 20 ms).
        """
        v2 = set(self._v2.values())
        return [str(folder / ("cgroup.procs" if folder in v2 else "tasks")) for folder in self.folders]

    def cpu_s(self) -> float | None:
        """CPU seconds of everything that ran in the group, or None where nobody counts them."""
        if v1 := self._v1.get("cpuacct"):
            return _number(v1 / "cpuacct.usage") / 1e9
        if v2 := self._v2.get("cpu"):
            return _table(v2 / "cpu.stat").get("usage_usec", 0) / 1e6
        return None

    def oom_kills(self) -> int:
        """Processes that the kernel ended for want of memory."""
        if v1 := self._v1.get("memory"):
            return _table(v1 / "memory.oom_control").get("oom_kill", 0)
        if v2 := self._v2.get("memory"):
            return _table(v2 / "memory.events").get("oom_kill", 0)
        return 0

    def refused_pids(self) -> int:
        """Forks that the limit refused."""
        folder = self._v1.get("pids") or self._v2.get("pids")
        return _table(folder / "pids.events").get("max", 0) if folder else 0

    def pids_peak(self) -> int:
        """Most processes at once in the life of the box, where the kernel counts them."""
        folder = self._v1.get("pids") or self._v2.get("pids")
        return max(0, _number(folder / "pids.peak") - OWN_PIDS + 1) if folder else 0

    def memory_now(self) -> int:
        """Bytes charged now."""
        if v1 := self._v1.get("memory"):
            return _number(v1 / "memory.usage_in_bytes")
        if v2 := self._v2.get("memory"):
            return _number(v2 / "memory.current")
        return 0

    def reset_peak(self) -> None:
        """Start a new measurement of peak memory, where the kernel can."""
        if v1 := self._v1.get("memory"):
            with contextlib.suppress(OSError):
                _write(v1 / "memory.max_usage_in_bytes", 0)

    def memory_peak(self) -> int:
        """Most bytes ever charged (version 1: since the last reset)."""
        if v1 := self._v1.get("memory"):
            return _number(v1 / "memory.max_usage_in_bytes")
        if v2 := self._v2.get("memory"):
            return _number(v2 / "memory.peak")
        return 0

    def kill(self) -> None:
        """End every process of the group at once where ``cgroup.kill`` exists, else one by one."""
        kill_members(self.folders[0])

    def remove(self) -> bool:
        """Remove the folders. False if something still lives in one of them."""
        removed = all([remove(folder) for folder in self.folders])
        if self._siblings:
            with contextlib.suppress(OSError):  # others are in it
                self._siblings.rmdir()
        return removed


def _write(path: Path, value: object) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, str(value).encode())
    finally:
        os.close(fd)


def _read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 4096)
    finally:
        os.close(fd)


def _number(path: Path) -> int:
    try:
        return int(_read(path))
    except (OSError, ValueError):
        return 0


def _table(path: Path) -> dict[str, int]:
    try:
        pairs = (line.split() for line in _read(path).decode().splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
    except OSError:
        return {}
