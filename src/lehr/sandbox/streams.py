"""Pipes between the host and a program: output kept as head and tail, input fed as fast as it is read."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os

CHUNK = 1 << 16
PAUSE_S = 0.002
"""How long the next chunk of a program stays in the pipe once more has come than is kept, so that a flood
does not keep the loop busy (at most 32 MB a second)."""


class Capture:
    """Drains one pipe into a bounded head and tail. ``fd`` must be non-blocking; it is closed at the end."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, limit_bytes: int) -> None:
        self._loop = loop
        self._fd = fd
        self._half = max(1, limit_bytes // 2)
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0
        self._pause: asyncio.TimerHandle | None = None
        self.ended = loop.create_future()
        loop.add_reader(fd, self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.EIO:  # a terminal that nobody holds open any more
                raise
            data = b""
        if data:
            self._keep(data)
            if self.total > 2 * self._half and not self._pause:
                self._loop.remove_reader(self._fd)
                self._pause = self._loop.call_later(PAUSE_S, self._resume)
        else:
            self.close()

    def _resume(self) -> None:
        self._pause = None
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._on_readable)

    def _keep(self, data: bytes) -> None:
        self.total += len(data)
        room = self._half - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail += data
            if len(self._tail) > self._half + 4 * CHUNK:
                del self._tail[: -self._half]

    def drain(self) -> None:
        """Take what is in the pipe now."""
        while self._fd >= 0:
            before = self.total
            self._on_readable()
            if self.total == before:
                return

    def take(self) -> tuple[bytes, bool]:
        """Return what was kept and whether the middle is missing; start anew."""
        truncated = self.total > 2 * self._half
        tail = self._tail[-self._half :]
        data = bytes(self._head + tail)
        self._head.clear()
        self._tail.clear()
        self.total = 0
        return data, truncated

    def close(self) -> None:
        """Stop reading. Idempotent."""
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            if self._pause:
                self._pause.cancel()
            os.close(self._fd)
            self._fd = -1
            if not self.ended.done():
                self.ended.set_result(None)


class Feeder:
    """Writes bytes into one pipe as its reader takes them. ``fd`` must be non-blocking."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int, data: bytes) -> None:
        self._loop = loop
        self._fd = fd
        self._left = memoryview(data)
        self.done = loop.create_future()
        self._on_writable()
        if self._fd >= 0:
            loop.add_writer(fd, self._on_writable)

    def _on_writable(self) -> None:
        try:
            while self._left:
                self._left = self._left[os.write(self._fd, self._left[:CHUNK]) :]
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
        self.close()

    def close(self) -> None:
        """Close the pipe; the program reads end of file. Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(ValueError):
                self._loop.remove_writer(self._fd)
            os.close(self._fd)
            self._fd = -1
            if not self.done.done():
                self.done.set_result(None)
