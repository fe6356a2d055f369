"""Naming what ended a program, from what the host and the runner saw."""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass

from lehr.sandbox.base import Limits, Verdict

PIDS_WORDS = (b"Resource temporarily unavailable", b"can't start new thread", b"Cannot fork")
MEMORY_WORDS = (b"MemoryError", b"Cannot allocate memory", b"std::bad_alloc", b"out of memory")


@dataclass(frozen=True, slots=True)
class Signs:
    """What was observed of one exec.

    status: exit status, negative for a signal. ended_by: who ended it on purpose, if anyone.
    full: the box's disk had no room or no inode left at the end. refused_pids, oom_kills: counted by the
    cgroup. limited: whether cgroups hold the limits; else rlimits do and the signs are read from the program.
    """

    status: int
    ended_by: str = ""
    full: bool = False
    refused_pids: int = 0
    oom_kills: int = 0
    limited: bool = True
    peak_bytes: int = 0
    peak_pids: int = 0
    stderr: bytes = b""


def name(
    signs: Signs, limits: Limits, wall_s: float, program: str = "the program"
) -> tuple[Verdict, int | None, int | None, str]:
    """Return verdict, exit code, signal and a sentence."""
    killed = signs.status < 0
    code = None if killed else signs.status
    number = -signs.status if killed else None
    if signs.ended_by.startswith("start:"):
        error = int(signs.ended_by.removeprefix("start:"))
        if error in (errno.EAGAIN, errno.ENOMEM):
            return "broken", None, None, f"the box could not start it: {os.strerror(error)}"
        code = 127 if error == errno.ENOENT else 126
        return "exit", code, None, f"cannot start {program}: {os.strerror(error)}"
    if signs.ended_by == "wall":
        return "timeout_wall", None, number, f"still running after {wall_s:g} s of wall time"
    if signs.ended_by == "session":
        return (
            "timeout_wall",
            None,
            number,
            f"the shell has been open for {limits.session_s:g} s; start another",
        )
    if signs.ended_by == "cpu" or number == signal.SIGXCPU:
        return "timeout_cpu", None, number, f"used more than {limits.cpu_s:g} s of CPU time"
    if signs.ended_by == "output":
        return "output", None, number, f"wrote far more than {limits.output_bytes} bytes of output"
    if signs.ended_by == "pids" or (signs.refused_pids and code != 0) or _crowded(signs, limits, code):
        return "pids", code, number, f"reached the limit of {limits.pids} processes"
    if signs.ended_by == "oom" or (signs.oom_kills and code != 0) or _starved(signs, limits, code):
        return "oom", code, number, f"reached the limit of {limits.memory_bytes >> 20} MiB of memory"
    if number == signal.SIGXFSZ or (signs.full and code != 0):
        return "disk", code, number, f"filled the box's disk ({limits.disk_bytes} bytes, {limits.inodes} files)"
    if killed:
        return "signal", None, number, f"ended by signal {number}"
    if code:
        return "exit", code, None, f"ended with status {code}"
    return "ok", 0, None, "its disk is full" if signs.full else ""


def _crowded(signs: Signs, limits: Limits, code: int | None) -> bool:
    """Where only rlimits hold: whether a failed program looks as if it was refused a process."""
    if signs.limited or code == 0:
        return False
    return signs.peak_pids >= limits.pids or any(word in signs.stderr[-4096:] for word in PIDS_WORDS)


def _starved(signs: Signs, limits: Limits, code: int | None) -> bool:
    """Where only rlimits hold: whether a failed program looks as if it was refused memory."""
    if signs.limited or code == 0:
        return False
    if signs.peak_bytes >= 0.8 * limits.memory_bytes:
        return True
    return any(word in signs.stderr[-4096:] for word in MEMORY_WORDS)
