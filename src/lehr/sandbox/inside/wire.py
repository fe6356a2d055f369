"""Frames on a socket to the host: ``!II`` (lengths of header and payload), a JSON header, a payload.

Descriptors ride on the first byte of a frame.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from typing import Any, NoReturn

CHUNK = 1 << 16
MOST_FDS = 16


class Wire:
    """One end of the socket. The host gone is the end of this process and of all that it started."""

    def __init__(self, end: socket.socket) -> None:
        self.end = end

    def receive(self) -> tuple[dict[str, Any], list[int], int]:
        """Return the next header, its descriptors and the length of the payload still to be read."""
        head, fds, _, _ = socket.recv_fds(self.end, 8, MOST_FDS)
        if not head:
            farewell()
        head += self.exactly(8 - len(head))
        size, payload = struct.unpack("!II", head)
        for fd in fds:
            os.set_inheritable(fd, False)
        return json.loads(self.exactly(size)), list(fds), payload

    def exactly(self, count: int) -> bytes:
        """Read ``count`` bytes."""
        parts: list[bytes] = []
        while count:
            part = self.end.recv(min(count, CHUNK))
            if not part:
                farewell()
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def send(self, header: dict[str, Any], *fds: int) -> None:
        """Send one frame without payload."""
        body = json.dumps({**header, "fds": len(fds)}).encode()
        frame = struct.pack("!II", len(body), 0) + body
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self.end.sendmsg([frame], ancillary)
        if sent < len(frame):
            self.end.sendall(frame[sent:])


def farewell() -> NoReturn:
    """End this process; the kernel ends its namespace with it."""
    os._exit(0)
