"""The attached streams of a pod: websocket messages whose first byte names the channel."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

INPUT, OUTPUT, ERRORS, STATUS = range(4)
PROTOCOL = "v4.channel.k8s.io"
CHUNK = 1 << 15
IDLE_S = 20.0
"""After which a ping is sent, so that nothing in between takes the connection for dead."""
SAID_BYTES = 4096


class Attached:
    """See :class:`lehr.sandbox.container.driver.Stream`.

    web: a connected ``websocket.WebSocket``; it is owned.
    """

    def __init__(self, web: Any) -> None:
        self._web = web
        self._end: socket.socket | None = web.sock
        self.said = ""
        web.settimeout(IDLE_S)

    def receive(self) -> bytes:
        """Return the next piece of what process 1 wrote, no bytes at the end."""
        import websocket

        while True:
            try:
                opcode, frame = self._web.recv_data_frame(True)
            except websocket.WebSocketTimeoutException:
                self._ping()
                continue
            except (websocket.WebSocketException, ValueError) as error:
                raise OSError(f"the websocket was cut: {error}") from error
            if opcode == websocket.ABNF.OPCODE_CLOSE:
                return b""
            if opcode not in (websocket.ABNF.OPCODE_BINARY, websocket.ABNF.OPCODE_TEXT) or len(frame.data) < 2:
                continue
            channel, data = frame.data[0], bytes(frame.data[1:])
            if channel == OUTPUT:
                return data
            if channel in (ERRORS, STATUS):
                self.said = (self.said + data.decode("utf-8", "replace"))[-SAID_BYTES:]

    def _ping(self) -> None:
        import websocket

        try:
            self._web.ping()
        except websocket.WebSocketException as error:
            raise OSError(f"the websocket was cut: {error}") from error

    def send(self, data: bytes) -> None:
        """Write to process 1; what is not taken in time cuts the stream."""
        import websocket

        try:
            for at in range(0, len(data), CHUNK):
                self._web.send_binary(bytes((INPUT,)) + data[at : at + CHUNK])
        except (websocket.WebSocketException, ValueError) as error:
            raise OSError(f"the websocket was cut: {error}") from error

    def cut(self) -> None:
        """End both ways at once. Idempotent."""
        if self._end is not None:
            with contextlib.suppress(OSError):
                socket.socket.shutdown(self._end, socket.SHUT_RDWR)  # over TLS too, without touching its state

    def close(self) -> None:
        """Cut it and free it. Idempotent."""
        self.cut()
        if self._end is not None:
            with contextlib.suppress(OSError):
                self._end.close()
