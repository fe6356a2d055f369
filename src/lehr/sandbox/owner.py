"""The name of this process on what it may leave behind, and whether the bearer of a name has ended."""

from __future__ import annotations

import functools
import os
from pathlib import Path


def _start_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


@functools.cache
def namespace() -> str:
    """Return the number of this PID namespace."""
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")


def owner() -> str:
    """Return the name by which what this process leaves behind is known as its own."""
    return f"lehr-{namespace()}-{os.getpid()}-{_start_of(os.getpid())}"


def owner_ended(name: str) -> bool:
    """Whether a name made of :func:`owner` belongs to a process of this PID namespace that has ended."""
    if not name.startswith(f"lehr-{namespace()}-"):
        return False
    pid, start = name.split("-")[2:4]
    return _start_of(int(pid)) != start
