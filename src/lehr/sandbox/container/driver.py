"""What drives containers for a backend: blocking calls, made in threads, each with a deadline of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lehr.sandbox.base import Limits, Spec

OWN_BYTES = 48 << 20
"""Memory of process 1, beside what programs and the disk may take."""
OWN_PIDS = 8
KERNEL_BYTES = 256 << 20
KERNEL_PIDS = 256
KERNEL_TASKS = 16
"""What gVisor's kernel takes on top, where the runtime is gVisor: the group holds all of it."""


class Stream(Protocol):
    """Standard input and output of a process 1, as its engine carries them. Used by two threads, one each way.

    said: the end of what came from its standard error, and of what the engine said about it.
    """

    said: str

    def receive(self) -> bytes:
        """Wait for what process 1 writes next; no bytes are the end. Raises ``OSError`` when it is cut."""
        ...

    def send(self, data: bytes) -> None:
        """Write to process 1. Raises ``OSError`` when it is cut, or takes nothing for too long."""
        ...

    def cut(self) -> None:
        """End both ways; a thread that waits in one returns. Idempotent."""
        ...

    def close(self) -> None:
        """Cut it and free what it holds, once no thread uses it: a number that is closed is soon another's."""
        ...


class Driver(Protocol):
    """Names are made by the backend, so that what was begun can be removed. Errors are lehr's own.

    own_kernel: whether boxes have gVisor's kernel. alone: whether they have no network device, not merely
    rules that forbid its use. renew_s: how often :meth:`renew` must be called, 0 for never.
    """

    own_kernel: bool
    alone: bool
    renew_s: float

    def open(self) -> None:
        """Connect, or raise ``MissingDependency`` / ``HostUnfit``; remove what ended owners left behind."""
        ...

    def start(self, name: str, spec: Spec, argv: Sequence[str]) -> Stream:
        """Make and start a container whose process 1 is ``argv``, and attach to it."""
        ...

    def give_up(self, name: str) -> None:
        """Nobody waits for a start any more: let it fail soon. Does not block."""
        ...

    def remove(self, name: str) -> None:
        """End a container at once and remove it, or what was begun of it. No error if there is none."""
        ...

    def starved(self, name: str) -> bool:
        """Whether the engine says that a container ended for want of memory."""
        ...

    def renew(self) -> None:
        """Say that the owner of its containers lives."""
        ...

    def close(self) -> None:
        """Disconnect. Idempotent."""
        ...


def room(limits: Limits, *, own_kernel: bool) -> tuple[int, int]:
    """Return the bytes and processes of the engine's group around a box: the hard limit behind the runner's.

    A box's disk is memory of its group.
    """
    memory, pids = limits.memory_bytes + limits.disk_bytes + OWN_BYTES, limits.pids + OWN_PIDS
    if own_kernel:
        return memory + KERNEL_BYTES, KERNEL_TASKS * pids + KERNEL_PIDS
    return memory, pids
