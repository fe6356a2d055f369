"""The program that a role's process runs: ``python -m lehr.cluster.child``, its start on stdin.

It arranges for its own death first, then pins itself, imports the target, and serves.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lehr.cluster.base import Role
from lehr.core.errors import ConfigError, UnknownName
from lehr.wire.codec import decode
from lehr.wire.serve import serve

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Start:
    """What a role's process is told before anything else."""

    role: Role
    address: str
    token: str
    incarnation: int
    parent: int


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when ``parent`` ends; end at once if it has ended already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        sys.exit(70)


def resolve_target(target: str) -> Callable[[dict[str, Any]], Any]:
    """Import ``module:function``."""
    module_name, colon, name = target.partition(":")
    if not colon:
        raise ConfigError(f"cannot read the target {target!r}", expected="module:function")
    module = importlib.import_module(module_name)
    function = getattr(module, name, None)
    if function is None:
        raise UnknownName.among("function", name, (n for n in vars(module) if not n.startswith("_")))
    return function


def main() -> None:
    """Run one role until home ends it."""
    start = decode(sys.stdin.buffer.read(), Start)
    die_with(start.parent)
    if start.role.cores:
        os.sched_setaffinity(0, start.role.cores)
    asyncio.run(
        serve(
            lambda: resolve_target(start.role.target)(start.role.config),
            start.address,
            start.token,
            start.role.name,
            start.incarnation,
            parent=start.parent,
        )
    )


if __name__ == "__main__":
    main()
