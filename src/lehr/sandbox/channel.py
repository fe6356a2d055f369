"""The host's end of a box's control socket: numbered requests, answers matched by number."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lehr.sandbox.errors import SandboxError

LARGEST_HEADER = 4 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """What the runner said. The receiver owns ``fds``."""

    header: dict[str, Any]
    fds: tuple[int, ...] = ()
    payload: bytes = b""


class ChannelLost(SandboxError):
    """The runner is gone: the box is broken."""

    code = "sandbox_broken"


class Channel:
    """Sends frames and hands each answer to whoever waits for its number."""

    def __init__(self, loop: asyncio.AbstractEventLoop, end: socket.socket) -> None:
        end.setblocking(False)
        self._loop = loop
        self._end = end
        self._buffer = bytearray()
        self._fds: list[int] = []
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._sending = asyncio.Lock()
        self._next = 1
        self.lost = False
        loop.add_reader(end.fileno(), self._on_readable)

    def expect(self, number: int | None = None) -> tuple[int, asyncio.Future[Answer]]:
        """Return a number and the future of the answer that will carry it."""
        if number is None:
            number, self._next = self._next, self._next + 1
        future: asyncio.Future[Answer] = self._loop.create_future()
        if self.lost:
            future.set_exception(ChannelLost("the box is gone"))
        else:
            self._waiting[number] = future
        return number, future

    async def send(self, header: dict[str, Any], fds: Sequence[int] = (), payload: bytes = b"") -> None:
        """Send one frame whole. Raises :class:`ChannelLost` if the box is gone."""
        body = json.dumps(header).encode("utf-8", "surrogateescape")
        frame = struct.pack("!II", len(body), len(payload)) + body
        async with self._sending:
            try:
                sent = socket.send_fds(self._end, [frame], list(fds)) if fds else self._end.send(frame)
                if sent < len(frame):
                    await self._loop.sock_sendall(self._end, frame[sent:])
                if payload:
                    await self._loop.sock_sendall(self._end, payload)
            except OSError as error:
                raise ChannelLost(f"the box does not answer: {error.strerror}") from error

    async def send_raw(self, data: bytes) -> None:
        """Send bytes that are no frame: the runner's source, before it can read frames."""
        try:
            await self._loop.sock_sendall(self._end, data)
        except OSError as error:
            raise ChannelLost(f"the box does not answer: {error.strerror}") from error

    def send_now(self, header: dict[str, Any]) -> bool:
        """Send a small frame without waiting; False if that is impossible."""
        body = json.dumps(header).encode()
        frame = struct.pack("!II", len(body), 0) + body
        try:
            return not self._sending.locked() and self._end.send(frame) == len(frame)
        except OSError:
            return False

    async def ask(self, header: dict[str, Any], fds: Sequence[int] = (), payload: bytes = b"") -> Answer:
        """Send a request and return its answer."""
        number, future = self.expect()
        try:
            await self.send({**header, "id": number}, fds, payload)
            return await future
        finally:
            self._waiting.pop(number, None)
            if future.done() and not future.cancelled():
                future.exception()

    def _on_readable(self) -> None:
        try:
            data, fds, _flags, _address = socket.recv_fds(self._end, 1 << 16, 8)
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        self._fds += fds
        if not data:
            self.close()
            return
        self._buffer += data
        while len(self._buffer) >= 8:
            size, _ = struct.unpack_from("!II", self._buffer)
            if size > LARGEST_HEADER:
                self.close()
                return
            if len(self._buffer) < 8 + size:
                return
            header: dict[str, Any] = json.loads(bytes(self._buffer[8 : 8 + size]))
            del self._buffer[: 8 + size]
            taken: tuple[int, ...] = ()
            if count := header.get("fds", 0):
                taken, self._fds = tuple(self._fds[:count]), self._fds[count:]
            waiter = self._waiting.pop(header["id"], None)
            if waiter is not None and not waiter.done():
                waiter.set_result(Answer(header, taken))
            else:
                for fd in taken:
                    os.close(fd)

    def close(self) -> None:
        """Forget the box; whoever waits gets :class:`ChannelLost`. Idempotent."""
        if self.lost:
            return
        self.lost = True
        with contextlib.suppress(ValueError, OSError):
            self._loop.remove_reader(self._end.fileno())
        self._end.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(ChannelLost("the box ended"))
                future.exception()
