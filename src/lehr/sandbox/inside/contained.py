"""Process 1 of a box that a container engine isolates: the relay, as the programs' own user, without any right.

The engine made namespaces, mounts and groups. What it was asked for is looked at from within before anything
runs; then this process locks itself and all that it will start up further: undumpable, Landlock, our filters.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

from lehr.sandbox.inside import rights, script
from lehr.sandbox.inside.relay import Pipes, Relay
from lehr.sandbox.inside.runner import Runner
from lehr.sandbox.inside.wire import farewell
from lehr.sandbox.inside.zygote import preload

DISKS = ("/work", "/tmp", "/dev/shm")
OOM = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
PIDS = ("/sys/fs/cgroup/pids.events", "/sys/fs/cgroup/pids/pids.events")


class Contained(Relay):
    """Serves the host's pipes until they close; then the container ends with it."""

    def __init__(self, pipes: Pipes, config: dict[str, Any], pack: int, io: int) -> None:
        super().__init__(pipes, config, pack)
        self.apart = False
        self.held = rights.Held(disk=-1, io=io, for_host={})
        self.refused = self.counts()

    def look(self) -> None:
        """Add up what programs use; ``/proc/meminfo`` is the box's own only where its kernel is."""
        if self.config["own_kernel"]:
            super().look()
        else:
            Runner.look(self)

    def full(self) -> bool:
        """Whether one of its disks has no room or no file left."""
        for path in DISKS:
            disk = os.statvfs(path)
            if disk.f_bavail == 0 or (disk.f_files and disk.f_favail == 0):
                return True
        return False

    def finish(self, done: Any, status: int, peak_bytes: int) -> None:
        """Report how a program ended, and whether the engine's group had a part in it."""
        before, self.refused = self.refused, self.counts()
        if status and not done.ended_by:
            names = [name for name in before if self.refused[name] > before[name]]
            done.ended_by = names[0] if names else ""
        super().finish(done, status, peak_bytes)

    def counts(self) -> dict[str, int]:
        """Return how often the group of the box ended a program for want of memory, or refused a process."""
        return {"oom": counted("oom_kill", OOM), "pids": counted("max", PIDS)}


def counted(word: str, paths: tuple[str, ...]) -> int:
    """Return the number behind a word in the first of these files that there is, 0 without one."""
    for path in paths:
        try:
            with open(path) as handle:
                table = dict(line.split() for line in handle)
            return int(table.get(word, 0))
        except (OSError, ValueError):
            continue
    return 0


def lacking(config: dict[str, Any]) -> list[str]:
    """Return what the engine was asked for and did not do."""
    with open("/proc/self/status") as handle:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in handle if ":\t" in line)
    user = (rights.CANDIDATE,) * 3
    kept = {
        "a process namespace of its own": os.getpid() == 1,
        f"a processor of the kind {config['machine']}": os.uname().machine == config["machine"],
        "user 1000 alone": os.getresuid() == user and os.getresgid() == user,
        "no capabilities": not int(status["CapPrm"], 16) and not int(status["CapEff"], 16),
        "no new privileges": status.get("NoNewPrivs", "1") == "1",
        "a read-only root": bool(os.statvfs("/").f_flag & os.ST_RDONLY),
        "writable /work, /tmp and /dev/shm": all(os.access(path, os.W_OK | os.X_OK) for path in DISKS),
        "no network": not (config["alone"] and interfaces() - {"lo"}),
    }
    return [name for name, true in kept.items() if not true]


def interfaces() -> set[str]:
    """Return the names of the network devices."""
    try:
        return {name for _, name in socket.if_nameindex()}
    except OSError:
        return set()


def settle(config: dict[str, Any]) -> None:
    """Raise ``OSError`` if the engine's promises do not hold; else give up what is left to give up."""
    if missing := lacking(config):
        raise OSError(f"it does not have {', '.join(missing)}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.umask(0o022)
    os.chdir("/work")
    rights.drop(config["filters"], apart=False)


def serve() -> script.Script:
    """Load what scripts use, say so, and become a box once the host says which. Returns only in forks."""
    pipes = Pipes()
    pack = os.memfd_create("tree", os.MFD_CLOEXEC)
    preload()
    pipes.send({"id": 0})
    config, _, _ = pipes.receive()
    try:
        io = os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        io = -1
    try:
        settle(config)
    except OSError as error:
        pipes.send({"id": 0, "error": str(error)})
        farewell()
    config["plain_path"] = [entry for entry in sys.path if entry and not entry.endswith("-packages")]
    return Contained(pipes, config, pack, io).serve()
