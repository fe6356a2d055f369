"""Joins the blocking stream of an engine to two descriptors, from and to which frames travel."""

from __future__ import annotations

import contextlib
import os
import socket
import threading

from lehr.sandbox.container.driver import Stream

CHUNK = 1 << 16


class Carrier:
    """Two threads that live as long as both sides do: what ends on one side is ended on the other. The one that
    reads from the engine ends last, and frees both.

    ends: to read from and to write to, owned by whoever takes them.
    """

    def __init__(self, stream: Stream, name: str) -> None:
        self._stream = stream
        near, self._far = socket.socketpair()
        try:
            self.ends = (os.dup(near.fileno()), near.detach())
        except OSError:
            near.close()
            self._far.close()
            raise
        self._outward = threading.Thread(target=self._send, name=f"{name}-in", daemon=True)
        self._inward = threading.Thread(target=self._receive, name=f"{name}-out", daemon=True)
        self._outward.start()
        self._inward.start()

    def _receive(self) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := self._stream.receive():
                    self._far.sendall(data)
        finally:
            with contextlib.suppress(OSError):
                self._far.shutdown(socket.SHUT_RDWR)
            self._outward.join()
            self._stream.close()
            self._far.close()

    def _send(self) -> None:
        try:
            with contextlib.suppress(OSError):
                while data := self._far.recv(CHUNK):
                    self._stream.send(data)
        finally:
            self._stream.cut()
