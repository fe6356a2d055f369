"""Hands out boxes: warm ones where there are, in the order of asking, never more than the limit at once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict
from typing import Literal

from lehr.core.errors import DeadlineExceeded, LehrError
from lehr.core.protocols import NullRecorder, Recorder
from lehr.sandbox.base import BACKENDS, Backend, Box, ExecResult, Shell, Spec
from lehr.sandbox.errors import SandboxError

RELEASE_S = 5.0
WARM_SPECS = 8


class LeasedBox:
    """A box as its holder sees it: every call is recorded, and refused once the lease has ended."""

    def __init__(
        self, box: Box, recorder: Recorder, backend: str, obtained: Literal["warm", "cold"], queue_s: float
    ):
        self._box = box
        self._recorder = recorder
        self._facts = {"box": box.id, "backend": backend, "obtained": obtained, "queue_s": queue_s}
        self.ended = False

    @property
    def id(self) -> str:
        """A name that is unique on this host."""
        return self._box.id

    def _live(self) -> Box:
        if self.ended:
            raise SandboxError(f"{self.id} was released", expected="a box whose lease is open")
        return self._box

    def _note(self, result: ExecResult, what: str) -> ExecResult:
        self._recorder.record(
            "sandbox.exec",
            **self._facts,
            program=what,
            verdict=result.verdict,
            exit_code=result.exit_code,
            signal=result.signal,
            truncated=result.truncated,
            detail=result.detail,
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
        result = await self._live().exec(argv, stdin=stdin, env=env, cwd=cwd, timeout_s=timeout_s)
        return self._note(result, argv[0])

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a regular file."""
        await self._live().write(path, data)

    async def read(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes:
        """Return a regular file's content."""
        return await self._live().read(path, limit_bytes=limit_bytes)

    async def tree(
        self, path: str = ".", *, limit_files: int = 4096, limit_bytes: int = 8 << 20
    ) -> Mapping[str, bytes | None]:
        """Return every regular file below ``path`` with its content, and each folder with None."""
        return await self._live().tree(path, limit_files=limit_files, limit_bytes=limit_bytes)

    async def shell(self) -> Shell:
        """Start a persistent shell in the working folder."""
        return LeasedShell(await self._live().shell(), self)

    def note_shell(self, result: ExecResult) -> ExecResult:
        """Record one command of a shell."""
        return self._note(result, "shell")

    async def destroy(self) -> None:
        """Kill everything in the box and remove what it wrote."""
        self.ended = True
        await self._box.destroy()


class LeasedShell:
    """A shell whose commands are recorded."""

    def __init__(self, shell: Shell, box: LeasedBox) -> None:
        self._shell = shell
        self._box = box

    async def run(self, command: str, *, timeout_s: float = 10.0) -> ExecResult:
        """Run one command line."""
        return self._box.note_shell(await self._shell.run(command, timeout_s=timeout_s))

    async def close(self) -> None:
        """End the shell and everything that it started."""
        await self._shell.close()


class Pool:
    """Boxes for one event loop. Life cycle: made anywhere, used in a running loop, ended by :meth:`close`.

    backend: a registered name or a backend. warm: boxes kept ready per spec, refilled in the background.
    limit: boxes leased at once. recorder: gets one ``sandbox.exec`` per call.
    """

    def __init__(
        self,
        backend: str | Backend = "bwrap",
        *,
        warm: int = 2,
        limit: int = 8,
        recorder: Recorder | None = None,
    ) -> None:
        self._backend: Backend = BACKENDS.get(backend)() if isinstance(backend, str) else backend
        self._warm_target = warm
        self._limit = limit
        self._recorder = recorder or NullRecorder()
        self._warm: OrderedDict[Spec, deque[Box]] = OrderedDict()
        self._making: dict[Spec, int] = {}
        self._leased: set[LeasedBox] = set()
        self._taken = 0
        self._line: deque[asyncio.Future[None]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def lease(self, spec: Spec, *, timeout_s: float = 30.0) -> AbstractAsyncContextManager[LeasedBox]:
        """Yield a fresh box and destroy it at the end; see :meth:`lehr.sandbox.base.Boxes.lease`."""
        return self._lease(spec, timeout_s)

    @contextlib.asynccontextmanager
    async def _lease(self, spec: Spec, timeout_s: float) -> AsyncGenerator[LeasedBox, None]:
        box = await self.acquire(spec, timeout_s=timeout_s)
        try:
            yield box
        finally:
            await self.release(box)

    async def acquire(self, spec: Spec, *, timeout_s: float = 30.0) -> LeasedBox:
        """Return a fresh box; pair with :meth:`release`. Raises ``DeadlineExceeded`` with the reason."""
        loop = asyncio.get_running_loop()
        asked = loop.time()
        await self._admit(timeout_s)
        queue_s = loop.time() - asked
        try:
            box = self._take_warm(spec)
            obtained: Literal["warm", "cold"] = "warm" if box else "cold"
            if box is None:
                left = max(0.0, timeout_s - queue_s)
                try:
                    async with asyncio.timeout(left):
                        box = await self._backend.create(spec)
                except TimeoutError as error:
                    raise DeadlineExceeded(f"a new box was not ready within {left:.1f} s") from error
        except BaseException:
            self._leave()
            raise
        leased = LeasedBox(box, self._recorder, self._backend.name, obtained, queue_s)
        self._leased.add(leased)
        self._refill(spec)
        return leased

    async def release(self, box: Box) -> None:
        """Destroy a box of :meth:`acquire`. Idempotent, shielded against cancellation, bounded in time."""
        if not isinstance(box, LeasedBox) or box not in self._leased:
            return
        self._leased.discard(box)
        box.ended = True
        await asyncio.shield(self._spawn(self._end(box)))

    async def _end(self, box: LeasedBox) -> None:
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELEASE_S):
                    await box.destroy()
        finally:
            self._leave()

    async def _admit(self, timeout_s: float) -> None:
        """Wait in line for one of ``limit`` places."""
        if self._closed:
            raise SandboxError("the pool is closed")
        if self._taken < self._limit and not self._line:
            self._taken += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._leave()
            elif turn in self._line:
                self._line.remove(turn)
            if isinstance(error, TimeoutError):
                raise DeadlineExceeded(
                    f"no box within {timeout_s:g} s: all {self._limit} are leased and "
                    f"{len(self._line)} others wait",
                    hint="Raise the pool's limit, or release boxes sooner",
                ) from error
            raise

    def _leave(self) -> None:
        """Give a place to the next in line, or back."""
        while self._line:
            turn = self._line.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._taken -= 1

    def warm_boxes(self, spec: Spec) -> int:
        """Return how many boxes of ``spec`` are ready."""
        return len(self._warm.get(spec, ()))

    def _take_warm(self, spec: Spec) -> Box | None:
        ready = self._warm.get(spec)
        while ready:
            box = ready.popleft()
            if not getattr(box, "broken", False):
                return box
            self._spawn(box.destroy())
        return None

    def _refill(self, spec: Spec) -> None:
        """Start making boxes until ``warm`` are ready or on their way; forget the spec unused longest."""
        if self._closed or self._warm_target <= 0:
            return
        self._warm.setdefault(spec, deque())
        self._warm.move_to_end(spec)
        while len(self._warm) > WARM_SPECS:
            _, old = self._warm.popitem(last=False)
            for box in old:
                self._spawn(box.destroy())
        if len(self._warm[spec]) + self._making.get(spec, 0) < self._warm_target:
            self._making[spec] = self._making.get(spec, 0) + 1
            self._spawn(self._make_warm(spec))

    async def _make_warm(self, spec: Spec) -> None:
        try:
            box = await self._backend.create(spec)
        except LehrError as error:
            self._making[spec] -= 1
            self._recorder.record("sandbox.refill_failed", backend=self._backend.name, detail=str(error))
            return
        except BaseException:
            self._making[spec] -= 1
            raise
        self._making[spec] -= 1
        if self._closed or spec not in self._warm:
            await box.destroy()
            return
        self._warm[spec].append(box)
        self._refill(spec)

    def _spawn(self, work: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Destroy every box, leased or warm. Whoever waits in line gets ``SandboxError``."""
        self._closed = True
        for turn in self._line:
            if not turn.done():
                turn.set_exception(SandboxError("the pool was closed"))
        self._line.clear()
        for box in list(self._leased):
            await self.release(box)
        for ready in self._warm.values():
            for box in ready:
                self._spawn(box.destroy())
        self._warm.clear()
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._backend.close()
