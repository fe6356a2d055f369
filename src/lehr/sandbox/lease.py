"""A box as its holder sees it: every call is recorded, and refused once the lease has ended."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Literal

from lehr.core.protocols import Recorder
from lehr.sandbox.base import Box, Entry, ExecResult, Opening, Shell, Snapshot
from lehr.sandbox.errors import SandboxError

TOLD, TOLD_WORD = 200, 60
"""Characters of a command line, and of each of its words, that are recorded."""


_NONE: Mapping[str, str] = MappingProxyType({})
_purpose: ContextVar[Mapping[str, str]] = ContextVar("purpose", default=_NONE)


@contextlib.contextmanager
def on_behalf_of(**names: str) -> Generator[None]:
    """Record ``names`` (task, attempt, phase) with every call of a box that is made inside."""
    token = _purpose.set({**_purpose.get(), **names})
    try:
        yield
    finally:
        _purpose.reset(token)


@dataclass(frozen=True, slots=True)
class Origin:
    """How a box was obtained. queue_s: seconds in line. made_s: seconds until it was made."""

    backend: str
    obtained: Literal["cold", "warm", "snapshot"]
    queue_s: float
    made_s: float
    domain: str


class LeasedBox:
    """A box under a lease, which ends when it is released, ``lease_s`` after the last call or renewal, or
    ``most_s`` after its beginning, whatever happens.

    expired: told when it has ended by itself. counts: where execs are counted by verdict.
    """

    def __init__(
        self,
        box: Box,
        recorder: Recorder,
        origin: Origin,
        lease_s: float,
        most_s: float,
        expired: Callable[[LeasedBox], None],
        counts: Counter[str],
    ) -> None:
        self._box = box
        self._recorder = recorder
        self.origin = origin
        self._facts = {"box": box.id, **asdict(origin)}
        self._lease_s = lease_s
        self._expired = expired
        self._counts = counts
        self._calls = 0
        self._loop = asyncio.get_running_loop()
        self._most_s = most_s
        self._until = self._loop.time() + lease_s
        self._last = self._loop.time() + most_s
        self._timer = self._loop.call_at(min(self._until, self._last), self._look)
        self._ended = ""

    def _look(self) -> None:
        """End the lease if nothing happened, else look again when it could next be over."""
        if self._ended:
            return
        now = self._loop.time()
        if now >= self._last:
            self.end(f"has expired: a box of its limits lives {self._most_s:g} s")
        elif self._calls or now < self._until:
            self._timer = self._loop.call_at(min(max(self._until, now + 0.1), self._last), self._look)
            return
        else:
            self.end(f"has expired: nothing happened for {self._lease_s:g} s")
        self._expired(self)

    def renew(self) -> None:
        """Let the lease last ``lease_s`` from now. Raises ``SandboxError`` if it has ended."""
        self._live()
        self._until = self._loop.time() + self._lease_s

    def end(self, how: str) -> None:
        """Refuse all further calls; ``how`` completes the sentence that says why."""
        self._ended = self._ended or how
        self._timer.cancel()

    @property
    def ended(self) -> bool:
        """Whether the lease has ended."""
        return bool(self._ended)

    @property
    def id(self) -> str:
        """A name that is unique on this host."""
        return self._box.id

    def _live(self) -> Box:
        if self._ended:
            raise SandboxError(f"{self.id} {self._ended}", expected="a box whose lease is open")
        return self._box

    @contextlib.asynccontextmanager
    async def _call(self) -> AsyncGenerator[Box, None]:
        """A call holds the lease, and renews it at its end."""
        box = self._live()
        self._calls += 1
        try:
            yield box
        finally:
            self._calls -= 1
            self._until = self._loop.time() + self._lease_s

    def _tell(self, kind: str, **fields: object) -> None:
        self._recorder.record(kind, **self._facts, **_purpose.get(), **fields)

    def _note(self, result: ExecResult, what: str) -> ExecResult:
        self._counts[f"exec {result.verdict}"] += 1
        self._tell(
            "sandbox.exec",
            program=what,
            verdict=result.verdict,
            exit_code=result.exit_code,
            signal=result.signal,
            truncated=result.truncated,
            detail=result.detail,
            denied=list(result.denied),
            connections=[asdict(item) for item in result.connections],
            **asdict(result.usage),
        )
        return result

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        timeout_s: float | None = None,
    ) -> ExecResult:
        """Run a program to its end; see :meth:`lehr.sandbox.base.Box.exec`."""
        async with self._call() as box:
            result = await box.exec(argv, stdin=stdin, env=env, cwd=cwd, timeout_s=timeout_s)
        return self._note(result, told(argv))

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a regular file."""
        async with self._call() as box:
            await box.write(path, data)

    async def read(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes:
        """Return a regular file's content."""
        async with self._call() as box:
            return await box.read(path, limit_bytes=limit_bytes)

    async def tree(
        self, path: str = ".", *, limit_files: int = 4096, limit_bytes: int = 8 << 20
    ) -> Mapping[str, Entry]:
        """Return everything below ``path``; see the protocol."""
        async with self._call() as box:
            return await box.tree(path, limit_files=limit_files, limit_bytes=limit_bytes)

    def shell(self, *, terminal: bool = False) -> Opening[LeasedShell]:
        """Start a persistent shell in the working folder."""
        return Opening(self._start_shell(terminal))

    async def _start_shell(self, terminal: bool) -> LeasedShell:
        return LeasedShell(await self._live().shell(terminal=terminal), self)

    async def snapshot(self, *, on_restore: Sequence[str] = ()) -> Snapshot:
        """Record the box's state; see :meth:`lehr.sandbox.base.Box.snapshot`."""
        if isinstance(on_restore, str):
            raise TypeError(f"on_restore is the string {on_restore!r}; expected a list such as ['sh', '-c', …]")
        async with self._call() as box:
            began = self._loop.time()
            taken = await box.snapshot(on_restore=on_restore)
        seconds = self._loop.time() - began
        self._recorder.record(
            "sandbox.snapshot", **self._facts, **_purpose.get(), snapshot=taken.id, wall_s=seconds
        )
        return taken

    async def restore(self, snapshot: Snapshot) -> None:
        """Bring a recorded state back; see :meth:`lehr.sandbox.base.Box.restore`."""
        async with self._call() as box:
            began = self._loop.time()
            await box.restore(snapshot)
            await self.after_restore(snapshot)
        seconds = self._loop.time() - began
        self._recorder.record(
            "sandbox.restore", **self._facts, **_purpose.get(), snapshot=snapshot.id, wall_s=seconds
        )

    async def after_restore(self, snapshot: Snapshot) -> None:
        """Run what the snapshot wants to be run first. Raises ``SandboxError`` if it fails."""
        if snapshot.on_restore:
            result = await self.exec(snapshot.on_restore)
            if result.verdict != "ok":
                raise SandboxError(
                    f"{' '.join(snapshot.on_restore)} failed after {snapshot.id} was restored: {result.detail}",
                    expected="a command that ends with status 0",
                )

    async def run_shell(self, shell: Shell, command: str, timeout_s: float) -> ExecResult:
        """Run and record one command of a shell."""
        async with self._call():
            result = await shell.run(command, timeout_s=timeout_s)
        return self._note(result, f"shell: {_short(command, TOLD)}")

    async def destroy(self) -> None:
        """Kill everything in the box and remove what it wrote."""
        self.end("was destroyed")
        await self._box.destroy()


class LeasedShell:
    """A shell whose commands are recorded."""

    def __init__(self, shell: Shell, box: LeasedBox) -> None:
        self._shell = shell
        self._box = box

    async def run(self, command: str, *, timeout_s: float = 10.0) -> ExecResult:
        """Run one command line."""
        return await self._box.run_shell(self._shell, command, timeout_s)

    async def send(self, data: bytes) -> None:
        """Type into the shell's terminal."""
        await self._shell.send(data)

    async def close(self) -> None:
        """End the shell and everything that it started."""
        await self._shell.close()


def told(argv: Sequence[str]) -> str:
    """Return a command line as it is recorded: on one line, long words and a long end cut off with a mark."""
    return _short(" ".join(shlex.quote(_short(" ".join(word.split()), TOLD_WORD)) for word in argv), TOLD)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"
