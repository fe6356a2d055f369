"""The attached streams of a container: pieces of its output and its errors behind headers of 8 bytes."""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import Any

OUTPUT, ERRORS = 1, 2
HEADER = 8
CHUNK = 1 << 16
SEND_S = 30.0
SAID_BYTES = 4096


class Attached:
    """See :class:`lehr.sandbox.container.driver.Stream`.

    end: a socket, or what has its methods; holders: what the client wrapped around it. They are owned. Over
    TLS a wait without limit would hold a lock that the other direction needs, so every wait ends and is begun
    anew.
    """

    def __init__(self, end: Any, *holders: Any) -> None:
        self._end = end
        self._holders = holders
        self._left = 0
        self._kind = OUTPUT
        self.said = ""
        end.settimeout(SEND_S)

    def receive(self) -> bytes:
        """Return the next piece of what process 1 wrote, no bytes at the end."""
        while True:
            while not self._left:
                header = self._exactly(HEADER)
                if len(header) < HEADER:
                    return b""
                self._kind, self._left = struct.unpack(">BxxxL", header)
            data = self._some(min(self._left, CHUNK))
            self._left -= len(data)
            if not data or self._kind == OUTPUT:
                return data
            if self._kind == ERRORS:
                self.said = (self.said + data.decode("utf-8", "replace"))[-SAID_BYTES:]

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count and (part := self._some(count - len(data))):
            data += part
        return data

    def _some(self, count: int) -> bytes:
        while True:
            try:
                return self._end.recv(count)
            except TimeoutError:
                continue

    def send(self, data: bytes) -> None:
        """Write to process 1; what it does not take in time cuts the stream."""
        self._end.sendall(data)

    def cut(self) -> None:
        """End both ways. Idempotent."""
        with contextlib.suppress(OSError):
            if isinstance(self._end, socket.socket):
                socket.socket.shutdown(self._end, socket.SHUT_RDWR)  # over TLS too, without touching its state
            else:
                self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cut it and free it. Idempotent."""
        self.cut()
        for holder in (*self._holders, self._end):
            with contextlib.suppress(OSError, ValueError):  # ValueError: a part of it was closed before
                holder.close()
