"""A persistent shell in a box: commands go in on one pipe, statuses come out on another.

Its streams are pipes, or a terminal of the host's whose other end we hold; the box has no device for it.

The shell runs each command with both pipes closed, so that nothing that it starts can read the next command
or write a status. Every status carries the number drawn for its command; any other is ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import secrets
import struct
import termios
from collections.abc import Callable
from typing import TYPE_CHECKING

from lehr.sandbox import verdict
from lehr.sandbox.base import ExecResult, Limits
from lehr.sandbox.channel import Answer, Channel, ChannelLost
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.streams import Capture, Feeder
from lehr.sandbox.watch import OUTPUT_FACTOR, PROMPT_S

if TYPE_CHECKING:
    from lehr.sandbox.box import RunnerBox
    from lehr.sandbox.watch import Meter

LOOP = (
    "while IFS= read -r -d '' -u 8 __n && IFS= read -r -d '' -u 8 __c; do "
    'eval "$__c" 8<&- 9>&-; printf "%s %s\\n" "$__n" "$?" >&9; done'
)
KEEP_ON = "trap : INT; "
"""On a terminal ^C ends the command that runs, not the shell."""
TICK_S = 0.05
GRACE_S = 0.3
SEND_S = 10.0
ROWS, COLUMNS = 24, 80


class PipeShell:
    """bash over pipes, or on a terminal. Started by ``box.shell()``, ended by :meth:`close` or its command."""

    def __init__(
        self, box: RunnerBox, number: int, answer: asyncio.Future[Answer], limits: Limits, fds: tuple[int, ...],
        meter: Callable[[], Meter], terminal: bool,
    ) -> None:  # fmt: skip
        self._box = box
        self._number = number
        self._answer = answer
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        out, err, self._commands, self._statuses = fds
        self._keyboard = os.dup(out) if terminal else -1
        self._streams = (
            Capture(self._loop, out, limits.output_bytes),
            Capture(self._loop, err, limits.output_bytes),
        )
        self._meter = meter
        self._turn = asyncio.Lock()
        self._until = self._loop.time() + limits.session_s
        self._nonce = ""
        self._status: asyncio.Future[int] = self._loop.create_future()
        self._heard = bytearray()
        self._open = True
        self._loop.add_reader(self._statuses, self._on_status)

    @classmethod
    async def start(
        cls,
        box: RunnerBox,
        channel: Channel,
        limits: Limits,
        meter: Callable[[], Meter],
        *,
        terminal: bool = False,
    ) -> PipeShell:
        """Start bash in the box's working folder."""
        number, answer = channel.expect()
        pairs = [os.pipe2(os.O_CLOEXEC) for _ in range(4)]
        (out, out_w), (err, err_w), (command_r, command), (status, status_w) = pairs
        for fd in (out, err):
            os.fchmod(fd, 0o666)  # may be opened by name, as in `echo x > /dev/stderr`; the other two may not
        null = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        if terminal:
            for fd in (out, out_w, err_w, null):
                os.close(fd)
            out, out_w = open_terminal()
            null, err_w = os.dup(out_w), os.dup(out_w)
        request = {
            "op": "exec", "id": number, "shell": True, "cwd": ".", "rlimits": box.rlimits(), "nice": box.nice,
            "argv": ["/bin/bash", "--noprofile", "--norc", "-c", KEEP_ON + LOOP if terminal else LOOP],
            "terminal": terminal,
            "env": {**box.environment, "TERM": "dumb"} if terminal else dict(box.environment),
        }  # fmt: skip
        try:
            await channel.send(request, (null, out_w, err_w, command_r, status_w))
        except BaseException:
            for fd in (out, err, command, status):
                os.close(fd)
            raise
        finally:
            for fd in (null, out_w, err_w, command_r, status_w):
                os.close(fd)
        for fd in (out, err, command, status):
            os.set_blocking(fd, False)
        return cls(box, number, answer, limits, (out, err, command, status), meter, terminal)

    def _on_status(self) -> None:
        try:
            data = os.read(self._statuses, 4096)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove_reader(self._statuses)
            return
        self._heard += data
        while b"\n" in self._heard:
            line, _, rest = bytes(self._heard).partition(b"\n")
            self._heard = bytearray(rest)
            nonce, _, code = line.partition(b" ")
            if nonce.decode("ascii", "replace") == self._nonce and code.isdigit() and not self._status.done():
                self._status.set_result(int(code))
        del self._heard[: max(0, len(self._heard) - 4096)]

    async def send(self, data: bytes) -> None:
        """Type into the terminal; see :meth:`lehr.sandbox.base.Shell.send`."""
        if self._keyboard < 0 and self._open:
            raise SandboxError("this shell has no terminal", expected="one of `box.shell(terminal=True)`")
        if not self._open or self._answer.done():
            raise SandboxError("the shell has ended", expected="a shell that is open")
        feeder = Feeder(self._loop, os.dup(self._keyboard), data)
        try:
            async with asyncio.timeout(SEND_S):
                await feeder.done
        except TimeoutError as error:
            raise SandboxError(f"nothing in the box reads what is typed ({len(data)} bytes)") from error
        finally:
            feeder.close()

    async def run(self, command: str, *, timeout_s: float = 10.0) -> ExecResult:
        """Run one command line; see :meth:`lehr.sandbox.base.Shell.run`."""
        try:
            whole = "\0" not in command and command.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            whole = False
        if whole is False:
            raise SandboxError(
                f"cannot run the command {command[:200]!r}", expected="one without NUL and lone surrogates"
            )
        async with self._turn:
            return await self._run(command, min(timeout_s, self._limits.wall_s))

    async def _run(self, command: str, wall_s: float) -> ExecResult:
        if not self._open or self._answer.done():
            return ExecResult("broken", None, b"", b"", detail="the shell has ended; start another")
        meter, started = self._meter(), self._loop.time()
        self._nonce = secrets.token_hex(8)
        self._status = self._loop.create_future()
        data = f"{self._nonce}\0{command}\0".encode("utf-8", "surrogateescape")
        feeder = Feeder(self._loop, os.dup(self._commands), data)
        reason = ""
        try:
            reason = await self._wait(min(started + wall_s, self._until), meter)
            if reason and self._loop.time() >= self._until:
                reason = "session"
                await self._end()
            elif reason:
                self._box.interrupt(self._number, children=True)
                await asyncio.wait([self._status, self._answer], timeout=GRACE_S, return_when="FIRST_COMPLETED")
                if not self._status.done():
                    await self._end()
        except asyncio.CancelledError:
            await asyncio.shield(self._loop.create_task(self._end()))
            raise
        finally:
            feeder.close()
            for stream in self._streams:
                stream.drain()
        wall = self._loop.time() - started
        (stdout, cut), (stderr, cut_err) = (stream.take() for stream in self._streams)
        header = {} if self._status.done() else self._last_words()
        usage = meter.usage(header, wall)
        if not self._status.done() and not header and not reason and meter.oom_kills() == 0:
            told = "the box ended", meter.denied(), meter.connections()
            return ExecResult("broken", None, stdout, stderr, cut or cut_err, None, usage, *told)
        status = self._status.result() if self._status.done() else header.get("status", -9)
        signs = verdict.Signs(
            status=status if not reason else -9,
            ended_by=reason,
            refused_pids=meter.refused_pids(),
            oom_kills=meter.oom_kills(),
            limited=meter.limited,
            stderr=stderr,
        )
        word, code, number, detail = verdict.name(signs, self._limits, wall_s)
        return ExecResult(
            word,
            code,
            stdout,
            stderr,
            cut or cut_err,
            number,
            usage,
            detail,
            meter.denied(),
            meter.connections(),
        )

    async def _wait(self, end: float, meter: Meter) -> str:
        """Wait for the status or the shell's end; return the limit that was passed, if any."""
        while True:
            left = end - self._loop.time()
            waited = [self._status, self._answer]
            done, _ = await asyncio.wait(
                waited, timeout=max(0, min(TICK_S, left)), return_when="FIRST_COMPLETED"
            )
            if done:
                return ""
            cpu_s = meter.cpu_s()
            if left <= TICK_S and self._loop.time() >= end:
                return "wall"
            if cpu_s is not None and cpu_s > PROMPT_S:
                meter.slow_down()
            if cpu_s is not None and cpu_s > self._limits.cpu_s:
                return "cpu"
            if meter.lost_to_memory():
                return "oom"
            if any(s.total > OUTPUT_FACTOR * self._limits.output_bytes for s in self._streams):
                return "output"

    def _last_words(self) -> dict[str, int]:
        if self._answer.done() and not self._answer.cancelled() and self._answer.exception() is None:
            return dict(self._answer.result().header)
        return {}

    async def _end(self) -> None:
        self._box.interrupt(self._number)
        await asyncio.wait([self._answer], timeout=GRACE_S)
        if not self._answer.done():
            self._box.give_up()
        self.abandon()

    def abandon(self) -> None:
        """Close the host's ends; the box ends what runs inside."""
        if self._open:
            self._open = False
            for stream in self._streams:
                stream.drain()
                stream.close()
            with contextlib.suppress(ValueError):
                self._loop.remove_reader(self._statuses)
            if self._keyboard >= 0:
                os.close(self._keyboard)
            os.close(self._commands)
            os.close(self._statuses)
            self._box.forget(self)

    async def close(self) -> None:
        """End the shell and everything that it started. Idempotent."""
        if self._open:
            if self._answer.done():
                with contextlib.suppress(ChannelLost):
                    self._answer.result()
                self.abandon()
            else:
                await self._end()


def open_terminal() -> tuple[int, int]:
    """Return both ends of a terminal that neither echoes nor changes what is printed."""
    ours, theirs = os.openpty()
    for fd in (ours, theirs):
        os.set_inheritable(fd, False)
    modes = termios.tcgetattr(theirs)
    modes[1] &= ~termios.OPOST
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    return ours, theirs
