"""Ends a build before its time: who waits for it sets an event, which the thread that builds looks at.

What runs a program for an image runs it by :func:`run`, and calls :func:`check` between what it does itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from lehr.sandbox.errors import SandboxError

T = TypeVar("T")
POLL_S = 0.05
GONE_S = 5.0
"""How long what was killed is waited for."""


class Halted(SandboxError):
    """A build was ended because nobody waits for it any more."""

    code = "image_build"


def check(halt: Event, what: str) -> None:
    """Raise ``Halted`` once ``halt`` is set. what: is being done, for the message."""
    if halt.is_set():
        raise Halted(
            f"{what} was stopped before it ended",
            expected="a caller that waits for it",
            hint="Nothing of it is kept; ask for it again.",
        )


def run(argv: Sequence[str], halt: Event, timeout_s: float, what: str, **options: Any) -> int | None:
    """Run a program; return its status, or None if it was ended for its time.

    Raises ``Halted``. However it returns, nothing of the program is left. options: of ``subprocess.Popen``.
    """
    check(halt, what)
    until = time.monotonic() + timeout_s
    process: subprocess.Popen[Any] = subprocess.Popen(argv, stdin=subprocess.DEVNULL, **options)
    try:
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(min(POLL_S, left))
            check(halt, what)
        return None
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    """Kill a program and those that it started, and wait until they are gone.

    The child of bubblewrap is process 1 of a namespace: it is gone when all that ran in there is.
    """
    if process.poll() is not None:
        return
    below: list[int] = []
    try:
        with contextlib.suppress(OSError):
            for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                below.append(os.pidfd_open(int(pid)))
        process.kill()
        for child in below:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(child, signal.SIGKILL)
        process.wait()
        until = time.monotonic() + GONE_S
        for child in below:
            select.select([child], [], [], max(0.0, until - time.monotonic()))
    finally:
        for child in below:
            os.close(child)


async def in_thread(work: Callable[[str, Event], T], name: str) -> T:
    """Return ``work(name, halt)``, done in a thread. A cancelled caller halts it and waits for its end."""
    halt = Event()
    working = asyncio.get_running_loop().run_in_executor(None, work, name, halt)
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        halt.set()
        await asyncio.wait([working])
        if not working.cancelled():
            working.exception()  # nobody waits for it any more
        raise


async def shared(finding: asyncio.Task[T], what: str) -> T:
    """Return what a task found for which others may wait too: a cancelled caller leaves it at work.

    Raises ``Halted`` where the task was ended. what: it was doing, for the message.
    """
    try:
        return await asyncio.shield(finding)
    except asyncio.CancelledError:
        asked = asyncio.current_task()
        if finding.cancelled() and not (asked and asked.cancelling()):
            raise Halted(
                f"{what} was stopped: what it was for was closed", expected="an open pool or backend"
            ) from None
        raise
