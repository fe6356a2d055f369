"""What the cases share: a check, and a Python program run in a box."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from lehr.sandbox.base import Box, Boxes, ExecResult, Limits, Spec

Case = Callable[[Boxes], Awaitable[None]]
MIB = 1 << 20


class NotHeld(AssertionError):
    """A backend broke a promise; the message says which and what was seen."""


def expect(held: bool, promise: str, seen: object = None) -> None:
    """Raise :class:`NotHeld` unless ``held``."""
    if not held:
        raise NotHeld(f"{promise}; seen: {seen!r}"[:2000])


def spec(**limits: Any) -> Spec:
    """Return a spec with small limits, so that attacks end soon."""
    small: dict[str, Any] = {"memory_bytes": 128 * MIB, "disk_bytes": 8 * MIB, "inodes": 512, "pids": 24}
    small |= {"wall_s": 10.0, "cpu_s": 8.0, "output_bytes": 64 << 10}
    return Spec(limits=Limits(**{**small, **limits}))


async def python(box: Box, code: str, *, timeout_s: float | None = None) -> ExecResult:
    """Run ``code`` in the box."""
    return await box.exec(["python3", "-I", "-c", code], timeout_s=timeout_s)


async def expect_works(box: Box, after: str) -> None:
    """The box still runs programs, and nothing else runs in it."""
    code = "import os; print('alive', sum(name.isdigit() for name in os.listdir('/proc')))"
    result = await python(box, code)
    expect(result.stdout.startswith(b"alive "), f"the box works after {after}", result)
    expect(int(result.stdout.split()[1]) <= 3, f"nothing is left alive after {after}", result.stdout)
