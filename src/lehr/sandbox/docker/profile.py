"""The lists of :mod:`lehr.sandbox.seccomp` in the form that the engine reads, so that they hold from the start.

Process 1 installs the same filter itself as well: where the engine's is not applied, ours still is.
"""

from __future__ import annotations

import errno
import functools
import json
from typing import Any

from lehr.sandbox import seccomp

ARCHITECTURES = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64", "riscv64": "SCMP_ARCH_RISCV64"}
"""By the machine's name. The 32-bit conventions are not on the list: they end the program."""
CONDITIONAL = ("clone", "personality", "prlimit64", "setpriority", "socket")
"""Allowed by their arguments alone. The engine reads several conditions on one argument as alternatives, so
that the two requests of ``ioctl`` that push input into terminals are left to the filter of process 1."""
NAMESPACES = functools.reduce(int.__or__, seccomp.NAMESPACE_FLAGS)


def profile(machine: str) -> dict[str, Any]:
    """Return the profile for a machine, as the engine's ``seccomp=`` option takes it.

    What is not named does not exist (ENOSYS); what is refused, is refused with EPERM.
    """
    denied = sorted({*seccomp.DENIED.split(), *seccomp.NEWER})
    allowed = sorted(set(seccomp.ALLOWED.split()) - set(denied) - set(CONDITIONAL))
    rules = [
        {"names": allowed, "action": "SCMP_ACT_ALLOW"},
        {"names": denied, "action": "SCMP_ACT_ERRNO", "errnoRet": errno.EPERM},
        _allow("clone", _arg(0, "SCMP_CMP_MASKED_EQ", NAMESPACES, 0)),
        _allow("personality", _arg(0, "SCMP_CMP_EQ", 0)),
        _allow("prlimit64", _arg(0, "SCMP_CMP_EQ", 0)),
    ]
    rules += [_allow("setpriority", _arg(0, "SCMP_CMP_EQ", kind)) for kind in range(seccomp.PRIO_USER)]
    rules += [
        _allow("socket", _arg(0, "SCMP_CMP_EQ", family))
        for family in (seccomp.AF_UNIX, seccomp.AF_INET, seccomp.AF_INET6)
    ]
    return {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": errno.ENOSYS,
        "architectures": [ARCHITECTURES[machine]] if machine in ARCHITECTURES else [],
        "syscalls": rules,
    }


def option(machine: str) -> str:
    """Return the security option that carries the profile."""
    return f"seccomp={json.dumps(profile(machine), separators=(',', ':'))}"


def _allow(name: str, *args: dict[str, Any]) -> dict[str, Any]:
    return {"names": [name], "action": "SCMP_ACT_ALLOW", "args": list(args)}


def _arg(index: int, operator: str, value: int, second: int = 0) -> dict[str, Any]:
    return {"index": index, "value": value, "valueTwo": second, "op": operator}
