"""The cluster protocol."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Role:
    """What to start. ``target`` is ``module:function``; the function gets ``config`` and returns a
    service object whose async methods are the role's requests.

    cores: processor numbers that the process is pinned to, () for all. threads: of torch and BLAS.
    """

    name: str
    target: str
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    cores: tuple[int, ...] = ()
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a role's process."""

    role: str
    kind: Literal["ready", "lost"]
    incarnation: int
    detail: str = ""


class Handle(Protocol):
    """A started role."""

    role: Role
    pid: int

    async def call(self, method: str, body: Any = None, *, returns: Any = None, timeout_s: float = 60.0) -> Any:
        """Send a request, return its answer decoded as ``returns``. Raises the error that its failure
        names, ``DeadlineExceeded``, or ``RoleLost`` as soon as the process is gone.
        """
        ...


class Cluster(Protocol):
    """Starts, watches and ends roles."""

    async def start(self, role: Role, *, timeout_s: float = 120.0) -> Handle:
        """Start a process and wait until it serves."""
        ...

    def watch(self) -> AsyncIterator[Event]:
        """Yield what happens to roles, until the cluster is closed."""
        ...

    async def close(self) -> None:
        """End every role: politely, then by force, in bounded time."""
        ...
