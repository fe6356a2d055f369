"""The sandbox protocol: a spec, a box, and a result that names what ended each call."""

from __future__ import annotations

from collections.abc import Coroutine, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from lehr.core.errors import ConfigError
from lehr.core.registry import Registry

if TYPE_CHECKING:
    from lehr.sandbox.setups import Setup

Verdict = Literal[
    "ok",  # the program ended by itself with status 0
    "exit",  # the program ended by itself with another status
    "signal",  # the program was ended by a signal that no limit explains
    "timeout_wall",
    "timeout_cpu",
    "oom",
    "pids",
    "disk",
    "output",
    "broken",  # the box itself no longer works; it is destroyed and rebuilt
]


LEAST = {
    "memory_bytes": 1 << 20, "disk_bytes": 4096, "inodes": 1, "pids": 1, "cpu": 0.01, "wall_s": 0.001,
    "cpu_s": 0.001, "output_bytes": 1, "network_bytes": 0, "session_s": 0.001, "lease_s": 0.001,
}  # fmt: skip
"""The smallest limits that mean something."""
MOST = {
    "memory_bytes": 1 << 50, "disk_bytes": 1 << 50, "inodes": 1 << 40, "pids": 1 << 21, "cpu": 1 << 16,
    "wall_s": 1e9, "cpu_s": 1e9, "output_bytes": 1 << 50, "network_bytes": 1 << 50, "session_s": 1e9,
    "lease_s": 1e9,
}  # fmt: skip
"""The largest that kernels take."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Hard limits of a box. wall_s and cpu_s are per exec, session_s is the life of a shell, lease_s that of
    the box, however often its lease is renewed. network_bytes is what may pass both ways in its life.

    disk_bytes and inodes bound everything writable (/work, /tmp and /dev/shm) together. output_bytes is per
    stream: head and tail are kept, the middle is drained and cut, and a program that writes more than 64
    times as much is ended with the verdict ``output``.
    """

    memory_bytes: int = 512 << 20
    disk_bytes: int = 64 << 20
    inodes: int = 16_384
    pids: int = 64
    cpu: float = 1.0
    wall_s: float = 10.0
    cpu_s: float = 10.0
    output_bytes: int = 1 << 20
    network_bytes: int = 256 << 20
    session_s: float = 3600.0
    lease_s: float = 86_400.0

    def __post_init__(self) -> None:
        """Raise ``ConfigError`` for what no box can have: file systems take a size of 0 for no limit."""
        for name, least in LEAST.items():
            value = getattr(self, name)
            whole = isinstance(least, int)
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise ConfigError(
                    f"a box cannot have {name} = {value!r}",
                    expected=f"{'a whole number' if whole else 'a number'}",
                )
            if not value >= least:
                raise ConfigError(f"a box cannot have {name} = {value}", expected=f"at least {least}")
            if value > MOST[name]:
                raise ConfigError(f"a box cannot have {name} = {value}", expected=f"at most {MOST[name]:g}")


@dataclass(frozen=True, slots=True)
class Spec:
    """What boxes may be exchanged for each other: the key of the pool. Files, environment and secrets
    are not part of it; they follow the lease.

    image: ``host`` is the allow-listed, read-only system folders of this machine; ``/a/root/folder``,
    ``oci:/an/archive.tar`` and ``docker:/an/archive.tar`` are systems of their own, with a python3 in them; any
    other is declared in a file, ``NAME:VARIANT`` or ``FILE.toml:VARIANT``, and built when it is first used.
    allow_hosts: what it may reach, through a proxy: ``example.org``, ``*.example.org:8443``. A box without has
    no network but its own loopback.
    """

    image: str = "host"
    limits: Limits = field(default_factory=Limits)
    allow_hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ExecUsage:
    """What one exec used, summed over every process that it started.

    cpu_s: of that, user_s and system_s as far as they are told apart. read_bytes, written_bytes: through
    system calls, whatever the file; what loading the program itself reads is in it.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    user_s: float = 0.0
    system_s: float = 0.0
    peak_bytes: int = 0
    peak_pids: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Connection:
    """One attempt to reach a host. refused: why it failed, or empty. Bytes are as the box saw them."""

    host: str
    port: int
    refused: str
    sent_bytes: int
    received_bytes: int
    wall_s: float


@dataclass(frozen=True, slots=True)
class ExecResult:
    """Outcome of one exec. ``exit_code`` is None unless the program ended by itself.

    stdout and stderr are bytes with the middle cut out beyond the limit; then ``truncated`` is True.
    ``detail`` is a sentence for a person where the verdict is not ``ok``, or the disk is full. denied: names of
    the system calls that the filter refused since the call before, where the backend is told of them.
    connections: attempts to reach allowed and other hosts since then; one that is still open is told again once
    more bytes have passed.
    """

    verdict: Verdict
    exit_code: int | None
    stdout: bytes
    stderr: bytes
    truncated: bool = False
    signal: int | None = None
    usage: ExecUsage = field(default_factory=ExecUsage)
    detail: str = ""
    denied: tuple[str, ...] = ()
    connections: tuple[Connection, ...] = ()


@dataclass(frozen=True, slots=True)
class Unread:
    """Something in a box's tree whose content is not taken: a link, a FIFO, socket or device (``special``), a
    file or a folder that may not be opened.
    """

    kind: Literal["link", "special", "file", "folder"]


Entry = bytes | None | Unread
"""What lies in a box's tree: a file by its content, a folder as None, and what cannot be taken."""


class Shell(Protocol):
    """A persistent shell inside a box. Exit codes travel out of band.

    On a terminal, what it prints comes as one stream, in ``stdout``, and it reads what :meth:`send` types.
    """

    async def run(self, command: str, *, timeout_s: float = 10.0) -> ExecResult:
        """Run one command line. Output up to a timeout is returned with the verdict."""
        ...

    async def send(self, data: bytes) -> None:
        """Type into the terminal of a shell that has one, while a command runs or before."""
        ...

    async def close(self) -> None:
        """End the shell and everything that it started."""
        ...


S = TypeVar("S", bound=Shell, covariant=True)


class Opening(Generic[S]):
    """A shell that is about to start: ``await`` it, or ``async with`` it, which closes it at the end."""

    def __init__(self, starting: Coroutine[Any, Any, S]) -> None:
        self._starting = starting

    def __await__(self) -> Generator[Any, Any, S]:
        return self._starting.__await__()

    async def __aenter__(self) -> S:
        self._shell = await self._starting
        return self._shell

    async def __aexit__(self, *_: object) -> None:
        await self._shell.close()


class Snapshot(Protocol):
    """The recorded state of a box. It outlives the box and holds memory or disk until it is discarded.

    kind: ``files`` is what the box's disk held; ``memory`` is that and every process that ran. A program that
    was restored with its memory repeats what it had drawn from a generator seeded before; fresh randomness
    of the kernel and a new box id are what each restored box gets.
    """

    @property
    def id(self) -> str:
        """A name that is unique on this host."""
        ...

    @property
    def spec(self) -> Spec:
        """What boxes it can be restored into."""
        ...

    @property
    def kind(self) -> Literal["files", "memory"]:
        """What it recorded."""
        ...

    @property
    def on_restore(self) -> Sequence[str]:
        """A program that runs first in each box that is restored from it, or nothing."""
        ...

    async def discard(self) -> None:
        """Free what it holds. Boxes that were restored from it live on. Idempotent."""
        ...


class Box(Protocol):
    """One isolated machine-within-the-machine. Paths are relative to its working folder ``/work``
    unless absolute; they are resolved inside the box without following links.
    """

    @property
    def id(self) -> str:
        """A name that is unique on this host."""
        ...

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        timeout_s: float | None = None,
    ) -> ExecResult:
        """Run a program to its end. Never raises for what the program did; see the verdict.

        ``timeout_s`` may only lower the wall limit of the spec. A cancelled caller kills the program. ``argv``
        is no command line: for one, run a shell on it.
        """
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a regular file. Raises ``SandboxError`` if the path is not one."""
        ...

    async def read(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes:
        """Return a regular file's content. Refuses links, devices, sockets, FIFOs, hard links to shared
        files and anything over ``limit_bytes`` with ``SandboxError``.
        """
        ...

    async def tree(
        self, path: str = ".", *, limit_files: int = 4096, limit_bytes: int = 8 << 20
    ) -> Mapping[str, Entry]:
        """Return everything below ``path``: files with their content, folders as None, the rest as
        :class:`Unread`. Raises ``Refused`` for more than the limits.
        """
        ...

    def shell(self, *, terminal: bool = False) -> Opening[Shell]:
        """Start a persistent shell in the working folder, with pipes or on a terminal (80 by 24)."""
        ...

    async def snapshot(self, *, on_restore: Sequence[str] = ()) -> Snapshot:
        """Record the box's state; what runs in it is held still meanwhile and goes on after.

        on_restore: a program that the pool runs in each box restored from it, before anybody has the box; for
        instance one that has what was seeded before seed anew.
        """
        ...

    async def restore(self, snapshot: Snapshot) -> None:
        """Kill everything in the box and bring the recorded state back. Shells of before have ended."""
        ...

    async def destroy(self) -> None:
        """Kill everything in the box and remove what it wrote. Idempotent and bounded in time."""
        ...


class Backend(Protocol):
    """Makes boxes."""

    name: str

    async def create(self, spec: Spec, snapshot: Snapshot | None = None, *, ahead: bool = False) -> Box:
        """Make a box, fresh or in the state of a snapshot, or raise ``HostUnfit`` / ``SandboxError``.

        ahead: nobody waits for it yet, so that its making yields to programs that run, where that can be said.
        """
        ...

    async def close(self) -> None:
        """Destroy what is left."""
        ...


class Boxes(Protocol):
    """Where boxes are leased; the pool, or a daemon's client. A lease always ends in destruction.

    A lease expires unless it is used or renewed. domain: on whose quota the box counts.
    """

    def lease(
        self, spec: Spec, *, timeout_s: float = 30.0, snapshot: Snapshot | None = None, domain: str = ""
    ) -> AbstractAsyncContextManager[Box]:
        """Yield a box, fresh or in the state of a snapshot. Waits in line up to ``timeout_s``, then raises
        ``DeadlineExceeded`` that says why no box was free. The box is destroyed at the end, also when the
        caller is cancelled.
        """
        ...

    async def acquire(
        self, spec: Spec, *, timeout_s: float = 30.0, snapshot: Snapshot | None = None, domain: str = ""
    ) -> Box:
        """The same by hand; pair with :meth:`release`."""
        ...

    async def release(self, box: Box) -> None:
        """Destroy a box that :meth:`acquire` returned. Idempotent, shielded, bounded in time."""
        ...

    def prepared(self, spec: Spec, setup: Setup) -> AbstractAsyncContextManager[Snapshot]:
        """Yield the state after a set-up, made once and kept, to lease boxes in it while inside."""
        ...


BACKENDS: Registry[type[Backend]] = Registry("sandbox")
