"""A role's connection to home, on a thread of its own.

The service may keep the event loop busy for as long as it likes (a gradient step does): heartbeats go
out all the same, and the end of home is noticed all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec
import zmq

from lehr.wire.message import Bye, Heartbeat, Hello, Message, pack, unpack
from lehr.wire.silence import Silence

HEARTBEAT_S = 1.0
GRACE_S = 5.0
ORPHANED = 70


class Link:
    """Sends and receives for one role. :meth:`start` once, :meth:`send` from any thread, :meth:`stop` once.

    take: called in ``loop`` with each message and its body. When home is gone, ``take`` sees a ``Bye``; a
    process that has not ended ``GRACE_S`` after that is ended with status ``ORPHANED``.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[Message, memoryview], None],
        *,
        parent: int | None,
        silence_limit_s: float,
    ) -> None:
        self._address = address
        self._hello = hello
        self._loop = loop
        self._take = take
        self._parent = parent
        self._silence = Silence(silence_limit_s, 2 * HEARTBEAT_S)
        self._out: deque[tuple[bytes, bytes]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lehr-wire", daemon=True)

    def start(self) -> None:
        """Connect and say hello."""
        self.send(self._hello)
        self._thread.start()

    def send(self, message: Message, body: bytes = b"") -> None:
        """Queue a message."""
        self._out.append((pack(message), body))
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Send what is queued and disconnect, within a second."""
        self._stopping.set()
        os.eventfd_write(self._wake, 1)
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            os.close(self._wake)

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.connect(self._address)
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        lost, last_sent = False, time.monotonic()
        while True:
            poller.poll(int(HEARTBEAT_S * 1000))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            stopping = self._stopping.is_set()
            if not self._out and time.monotonic() - last_sent >= HEARTBEAT_S:
                self._out.append((pack(Heartbeat()), b""))
            while self._out:
                socket.send_multipart(self._out.popleft())
                last_sent = time.monotonic()
            if stopping:
                break
            self._receive(socket)
            if not lost and self._home_is_gone():
                lost = True
                self._deliver(Bye(), memoryview(b""))
                timer = threading.Timer(GRACE_S, os._exit, (ORPHANED,))
                timer.daemon = True
                timer.start()
        socket.close(linger=1000)
        context.term()

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            self._silence.heard()
            try:
                message = unpack(frames[0].buffer)
            except msgspec.DecodeError:
                continue
            if not isinstance(message, Heartbeat):
                self._deliver(message, frames[1].buffer if len(frames) > 1 else memoryview(b""))

    def _deliver(self, message: Message, body: memoryview) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the process is ending
            self._loop.call_soon_threadsafe(self._take, message, body)

    def _home_is_gone(self) -> bool:
        orphan = self._parent is not None and os.getppid() != self._parent
        return self._silence.tick() or orphan
