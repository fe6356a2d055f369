"""A box whose process 1 is our runner: one program at a time, shells beside it, files in and out."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lehr.core.errors import ConfigError
from lehr.sandbox import collect, egress, image, verdict
from lehr.sandbox.base import Entry, ExecResult, Opening, Snapshot, Spec
from lehr.sandbox.channel import Answer, Channel, ChannelLost
from lehr.sandbox.errors import Absent, Refused, SandboxError
from lehr.sandbox.launch import Process
from lehr.sandbox.shell import PipeShell
from lehr.sandbox.streams import Capture, Feeder
from lehr.sandbox.watch import Meter, Watch

if TYPE_CHECKING:
    from lehr.sandbox.zygote import Layers

GRACE_S = 0.35
NICE = 10


class RunnerBox:
    """Life cycle: made by a backend, used under one lease, destroyed. Broken ones answer ``broken``.

    env: the variables of every program in it.
    """

    def __init__(
        self,
        spec: Spec,
        process: Process,
        channel: Channel,
        maker: Maker,
        env: Mapping[str, str] = image.ENVIRONMENT,
    ) -> None:
        self.id = f"box-{secrets.token_hex(6)}"
        self._maker = maker
        self.spec = spec
        self.env = env
        self._process = process
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._shells: list[PipeShell] = []
        self._released = False
        self._destroying: asyncio.Task[None] | None = None
        self.ended: asyncio.Future[None] = self._loop.create_future()

    @property
    def broken(self) -> bool:
        """Whether the box no longer works."""
        return self._channel.lost

    @property
    def limited(self) -> bool:
        """Whether a cgroup holds the limits of programs; else rlimits and the runner do."""
        return self._process.group is not None

    def meter(self) -> Meter:
        """Start to count what the next program uses."""
        return Meter(self._process)

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
        if isinstance(argv, str):
            raise TypeError(f"argv is the string {argv!r}; expected a list such as ['sh', '-c', {argv!r}]")
        if timeout_s is not None and not timeout_s > 0:
            raise ConfigError(f"a program cannot have timeout_s = {timeout_s}", expected="seconds above 0")
        if not argv or any("\0" in part for part in (*argv, cwd, *(env or {}), *(env or {}).values())):
            raise SandboxError(f"cannot run {list(argv)!r}", expected="a program and arguments without NUL")
        async with self._turn:
            return await self._run(list(argv), stdin, env or {}, cwd, timeout_s)

    async def _run(
        self, argv: list[str], stdin: bytes, env: Mapping[str, str], cwd: str, timeout_s: float | None
    ) -> ExecResult:
        limits, loop = self.spec.limits, self._loop
        if self.broken:
            return ExecResult("broken", None, b"", b"", detail="the box has ended")
        wall_s = limits.wall_s if timeout_s is None else min(timeout_s, limits.wall_s)
        with contextlib.ExitStack() as ends:
            out_read, out_write = pipe(ends)
            err_read, err_write = pipe(ends)
            in_read, in_write = pipe(ends) if stdin else (os.open("/dev/null", os.O_RDONLY), -1)
            ends.callback(close_quietly, in_read)
            if self._process.group and self._released:
                self._released = False
                self._process.group.throttle(True)
            if self._process.group:
                self._process.group.hurry(True)
            meter = self.meter()
            number, answer = self._channel.expect()
            watch = Watch(self, number, meter, wall_s)
            started = loop.time()
            request = {
                "op": "exec", "id": number, "argv": argv, "cwd": cwd, "env": {**self.environment, **env},
                "base_env": image.ENVIRONMENT,
                "rlimits": self.rlimits(), "nice": self.nice,
            }  # fmt: skip
            captures: list[Capture] = []
            feeder: Feeder | None = None
            try:
                await self._channel.send(request, (in_read, out_write, err_write))
                for fd in (in_read, out_write, err_write):
                    close_quietly(fd)
                ends.pop_all()
                for fd in (out_read, err_read, in_write):
                    if fd >= 0:
                        os.set_blocking(fd, False)
                captures = [Capture(loop, fd, limits.output_bytes) for fd in (out_read, err_read)]
                feeder = Feeder(loop, in_write, stdin) if stdin else None
                watch.start(captures)
                header = (await asyncio.shield(answer)).header
                if not self._shells and not header.get("resisted"):
                    await asyncio.wait([c.ended for c in captures], timeout=GRACE_S)
            except ChannelLost:
                header = {}
            except asyncio.CancelledError:
                watch.end("cancelled")
                await asyncio.shield(asyncio.wait([answer], timeout=1.0))
                if not answer.done():
                    self._process.kill()
                    self._channel.close()
                raise
            finally:
                watch.stop()
                if feeder:
                    feeder.close()
                for capture in captures:
                    capture.drain()
                    capture.close()
                if answer.done() and not answer.cancelled():
                    answer.exception()
        wall = loop.time() - started
        (stdout, cut), (stderr, cut_err) = (c.take() for c in captures) if captures else ((b"", False),) * 2
        output, truncated = (stdout, stderr), cut or cut_err
        return self._result(header, watch.reason, meter, wall, wall_s, output, truncated, argv[0])

    def _result(
        self, header: dict[str, Any], reason: str, meter: Meter, wall: float, wall_s: float,
        output: tuple[bytes, bytes], truncated: bool, program: str,
    ) -> ExecResult:  # fmt: skip
        usage = meter.usage(header, wall)
        stdout, stderr = output
        if not header and not reason and meter.oom_kills() == 0:
            detail = "the box stopped working while the program ran"
            told = meter.denied(), meter.connections()
            return ExecResult("broken", None, stdout, stderr, truncated, None, usage, detail, *told)
        if "error" in header:
            detail = f"the box could not start it: {header['error']}"
            return ExecResult("broken", None, stdout, stderr, truncated, None, usage, detail)
        if header.get("resisted"):
            self._process.kill()
            self._channel.close()
        signs = verdict.Signs(
            status=header.get("status", -9),
            ended_by=reason or header.get("ended_by", ""),
            full=header.get("full", False),
            refused_pids=meter.refused_pids(),
            oom_kills=meter.oom_kills(),
            limited=self.limited,
            peak_bytes=usage.peak_bytes,
            peak_pids=usage.peak_pids,
            stderr=stderr,
        )
        word, code, number, detail = verdict.name(signs, self.spec.limits, wall_s, program)
        return ExecResult(
            word, code, stdout, stderr, truncated, number, usage, detail, meter.denied(), meter.connections()
        )

    @property
    def environment(self) -> Mapping[str, str]:
        """What programs find in their environment."""
        return {**self.env, **egress.environment()} if self.spec.allow_hosts else self.env

    def rlimits(self) -> dict[str, tuple[int, int]]:
        """Return the limits of each single process, a second line behind cgroups or the first without."""
        limits = self.spec.limits
        cpu = math.ceil(limits.cpu_s)
        table = {
            "CORE": (1, 1),  # unlike 0, also keeps a piped core handler of the host from running
            "NOFILE": (1024, 1024),
            "FSIZE": (limits.disk_bytes, limits.disk_bytes),
            "MEMLOCK": (65536, 65536),
            "CPU": (cpu, cpu + 1),
            "RTPRIO": (0, 0),
            "NICE": (0, 0),
            "MSGQUEUE": (0, 0),
        }
        if not self.limited:
            table["AS"] = (limits.memory_bytes, limits.memory_bytes)
            table["NPROC"] = (limits.pids + 2, limits.pids + 2)  # the runner, and one by which to notice
        return table

    @property
    def nice(self) -> int:
        """How much programs yield to the runner: only where the box's CPU share is its own."""
        return NICE if self._process.group else 0

    def interrupt(self, number: int, *, children: bool = False) -> None:
        """Ask the runner to end an exec; if it cannot, end the box."""
        if self._process.group and not self._released:
            self._released = True
            self._process.group.throttle(False)
        request = {"op": "kill", "id": 0, "target": number, "children": children}
        if not self._channel.send_now(request):
            self.give_up()

    def give_up(self) -> None:
        """End the box at once: it did not obey."""
        self._process.kill()
        self._channel.close()

    async def write(self, path: str, data: bytes) -> None:
        """Create or replace a regular file; see the protocol."""
        if not isinstance(data, (bytes, bytearray, memoryview)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"data for {path!r} is of type {type(data).__name__}; expected bytes")
        async with self._turn:
            await self._ask({"op": "write", "path": path, "mode": 0o644}, path, (), bytes(data))

    async def read(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes:
        """Return a regular file's content; see the protocol."""
        async with self._turn:
            answer = await self._ask({"op": "open", "path": path}, path)
        try:
            return collect.take(answer.fds[0], path, limit_bytes)
        finally:
            for fd in answer.fds:
                os.close(fd)

    async def tree(
        self, path: str = ".", *, limit_files: int = 4096, limit_bytes: int = 8 << 20
    ) -> Mapping[str, Entry]:
        """Return everything below ``path``; see the protocol."""
        request = {"op": "tree", "path": path, "limit_files": limit_files, "limit_bytes": limit_bytes}
        pack = os.memfd_create("tree", os.MFD_CLOEXEC)
        try:
            async with self._turn:
                answer = await self._ask(request, path, (pack,))
            return collect.unpack(pack, [(name, size) for name, size in answer.header["entries"]])
        finally:
            os.close(pack)

    async def _ask(
        self, request: dict[str, Any], path: str, fds: Sequence[int] = (), payload: bytes = b""
    ) -> Answer:
        if not isinstance(path, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"the path {path!r} is of type {type(path).__name__}; expected str")
        if not path or "\0" in path or not _is_encodable(path):
            raise Refused(f"cannot use the path {path!r}", expected="a path without NUL and lone surrogates")
        try:
            async with asyncio.timeout(10.0):
                answer = await self._channel.ask(request, fds, payload)
        except TimeoutError as error:
            self.give_up()
            raise SandboxError(f"the box did not answer when asked to {request['op']} {path}") from error
        if "error" in answer.header:
            kind = Absent if answer.header.get("errno") == errno.ENOENT else Refused
            raise kind(f"cannot {request['op']} {path} in the box: {answer.header['error']}")
        return answer

    def shell(self, *, terminal: bool = False) -> Opening[PipeShell]:
        """Start a persistent shell in the working folder."""
        return Opening(self._start_shell(terminal))

    async def _start_shell(self, terminal: bool) -> PipeShell:
        shell = await PipeShell.start(self, self._channel, self.spec.limits, self.meter, terminal=terminal)
        self._shells.append(shell)
        return shell

    def forget(self, shell: PipeShell) -> None:
        """Called by a shell that ended."""
        if shell in self._shells:
            self._shells.remove(shell)

    async def snapshot(self, *, on_restore: Sequence[str] = ()) -> Snapshot:
        """Record what is on the box's disk. Costs what it takes to copy what changed since the last one."""
        limits, layers = self.spec.limits, self._process.layers
        async with self._turn:
            answer = await self._ask({"op": "hold"}, "its disk")
            try:
                recorded, size = await layers.zygote.record(
                    answer.fds[0], layers, limits.disk_bytes, limits.inodes
                )
            except ChannelLost as error:
                raise SandboxError("the box's disk cannot be recorded: the box is gone") from error
            finally:
                os.close(answer.fds[0])
                await self._ask({"op": "go"}, "its programs")
        return FileSnapshot(self.spec, recorded, size, on_restore)

    async def restore(self, snapshot: Snapshot) -> None:
        """Kill everything in the box and bring the recorded disk back, in namespaces that are new."""
        self._maker.check(self.spec, snapshot)
        self.give_up()
        async with self._turn:
            for shell in list(self._shells):
                shell.abandon()
            before = self._process
            old = self._loop.create_task(before.gone())
            try:
                self._process, self._channel = await self._maker.start(self.spec, snapshot)
                self._released = False
            finally:
                await asyncio.shield(old)
            if before.egress and self._process.egress:
                self._process.egress.follow(before.egress)

    async def destroy(self) -> None:
        """Kill everything in the box and remove what it wrote. Idempotent and bounded in time."""
        if self._destroying is None:
            self._destroying = self._loop.create_task(self._destroy())
        await asyncio.shield(self._destroying)

    async def _destroy(self) -> None:
        self._process.kill()
        self._channel.close()
        for shell in list(self._shells):
            shell.abandon()
        await self._process.gone()
        if not self.ended.done():
            self.ended.set_result(None)


class Maker(Protocol):
    """What starts a process 1 for a box that is restored."""

    def check(self, spec: Spec, snapshot: Snapshot) -> None:
        """Raise ``SandboxError`` if a box of the spec cannot be restored from it."""
        ...

    async def start(self, spec: Spec, snapshot: Snapshot | None = None) -> tuple[Process, Channel]:
        """Start it in the state of the snapshot."""
        ...


class FileSnapshot:
    """What was on a box's disk. See :class:`lehr.sandbox.base.Snapshot`."""

    kind: Literal["files", "memory"] = "files"

    def __init__(self, spec: Spec, layers: Layers, size_bytes: int = 0, on_restore: Sequence[str] = ()) -> None:
        self.id = f"snapshot-{secrets.token_hex(6)}"
        self.spec = spec
        self.on_restore = tuple(on_restore)
        self.layers = layers
        self.size_bytes = size_bytes

    @property
    def lost(self) -> bool:
        """Whether the process that held it has ended."""
        return self.layers.zygote.lost

    async def discard(self) -> None:
        """Free its layers as far as nobody else stands on them. Idempotent."""
        self.layers.free()


def pipe(ends: contextlib.ExitStack) -> tuple[int, int]:
    """Return a pipe whose ends are closed with ``ends``. Who holds an end may open it again by its name, as
    ``echo x > /dev/stderr`` does: only its holders have that name.
    """
    read, write = os.pipe2(os.O_CLOEXEC)
    os.fchmod(read, 0o666)
    ends.callback(close_quietly, read)
    ends.callback(close_quietly, write)
    return read, write


def _is_encodable(path: str) -> bool:
    try:
        os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return True


def close_quietly(fd: int) -> None:
    """Close a descriptor that may be closed already."""
    with contextlib.suppress(OSError):
        os.close(fd)
