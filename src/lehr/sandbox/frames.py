"""The host's end of a box without descriptors: requests, answers and streams as frames on two pipes.

What looks to a box like :class:`~lehr.sandbox.channel.Channel` takes the descriptors that are sent along with
an exec as its own ends: it reads the inputs and sends what it reads, and writes what programs said to the
outputs. All that comes out of a box is checked before it is believed.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

from lehr.sandbox.channel import LARGEST_HEADER, Answer, Channel, ChannelLost

CHUNK = 1 << 16
MOST_HELD = 4 << 20
INPUTS = (0, 3)
FIELDS: dict[str, tuple[type, ...]] = {
    "id": (int,), "status": (int,), "ended_by": (str,), "full": (bool,), "resisted": (int,),
    "user_s": (int, float), "system_s": (int, float), "read_bytes": (int,), "written_bytes": (int,),
    "peak_bytes": (int,), "peak_pids": (int,), "error": (str,), "errno": (int,),
    "stream": (int,), "took": (bool,), "entries": (list,), "facts": (list,),
}  # fmt: skip
"""What a header may hold."""


class Outlet:
    """What one exec said, in order: pieces for its outputs, then its answer."""

    def __init__(self, loop: asyncio.AbstractEventLoop, outputs: dict[int, int]) -> None:
        self._loop = loop
        self._outputs = outputs
        self._queue: deque[tuple[int, bytes]] = deque()
        self._blocked = -1
        self.held = 0
        self.answer: tuple[asyncio.Future[Answer], Answer] | None = None

    def put(self, place: int, data: bytes) -> None:
        """Pass a piece on; no bytes are the stream's end."""
        self._queue.append((place, data))
        self.held += len(data)
        if self._blocked < 0:
            self.flush()

    def flush(self) -> None:
        """Write what the pipes take."""
        self._unblock()
        while self._queue:
            place, data = self._queue.popleft()
            fd = self._outputs.get(place, -1)
            self.held -= len(data)
            if fd < 0:
                continue
            try:
                rest = data[os.write(fd, data) :] if data else b""
            except BlockingIOError:
                rest = data
            except OSError:
                data = rest = b""
            if rest:
                self._queue.appendleft((place, rest))
                self.held += len(rest)
                self._blocked = fd
                self._loop.add_writer(fd, self.flush)
                return
            if not data:
                os.close(self._outputs.pop(place))
        if self.answer and not self.answer[0].done():
            self.answer[0].set_result(self.answer[1])

    def _unblock(self) -> None:
        if self._blocked >= 0:
            self._loop.remove_writer(self._blocked)
            self._blocked = -1

    def close(self) -> None:
        """Let the readers see the end."""
        self._unblock()
        self._queue.clear()
        for fd in self._outputs.values():
            os.close(fd)
        self._outputs.clear()


class Inlet:
    """One input of an exec, sent piece by piece as the program takes it."""

    def __init__(self, channel: StreamChannel, fd: int, number: int, place: int) -> None:
        self._channel = channel
        self._fd = fd
        self._header = {"op": "feed", "id": 0, "target": number, "stream": place}
        os.set_blocking(fd, False)
        self.ask()

    def ask(self) -> None:
        """The program took the last piece: read the next when there is one."""
        if self._fd >= 0:
            self._channel.loop.add_reader(self._fd, self._on_readable)

    def _on_readable(self) -> None:
        try:
            data = os.read(self._fd, CHUNK)
        except BlockingIOError:
            return
        self._channel.loop.remove_reader(self._fd)
        self._channel.post(self._header, data)
        if not data:
            self.close()

    def close(self) -> None:
        """Read no more."""
        if self._fd >= 0:
            self._channel.loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


class StreamChannel(Channel):
    """Life cycle: made on the two ends of a box; may be held while the box is recorded, and attached again."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ends: tuple[int, int]) -> None:
        self.loop = self._loop = loop
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._outlets: dict[int, Outlet] = {}
        self._inlets: dict[tuple[int, int], Inlet] = {}
        self._room: dict[int, int] = {}
        self._next = 1
        self.lost = False
        self._holding = False
        self._later: list[tuple[dict[str, Any], bytes]] = []
        self._ends = (-1, -1)
        self._attach(ends)

    def _attach(self, ends: tuple[int, int]) -> None:
        self._buffer = bytearray()
        self._out = bytearray()
        self._written = self._loop.create_future()
        self._ends, self._deaf = ends, False
        for fd in ends:
            os.set_blocking(fd, False)
        self._loop.add_reader(ends[0], self._on_readable)

    # --- to the box

    def post(self, header: dict[str, Any], payload: bytes = b"") -> None:
        """Send a frame as soon as the box takes it."""
        if self.lost:
            return
        if self._holding:
            self._later.append((header, payload))
            return
        body = json.dumps(header).encode("utf-8", "surrogateescape")
        if self._written.done():
            self._written = self._loop.create_future()
        self._out += struct.pack("!II", len(body), len(payload)) + body
        self._out += payload
        self._on_writable()

    def _on_writable(self) -> None:
        fd = self._ends[1]
        try:
            while self._out:
                del self._out[: os.write(fd, memoryview(self._out)[:CHUNK].tobytes())]
        except BlockingIOError:
            self._loop.add_writer(fd, self._on_writable)
            return
        except OSError:
            self.close()
            return
        self._loop.remove_writer(fd)
        if not self._written.done():
            self._written.set_result(None)

    async def send(self, header: dict[str, Any], fds: Sequence[int] = (), payload: bytes = b"") -> None:
        """Send one frame whole. Of an exec, descriptors are its ends. Raises ``ChannelLost``."""
        if self.lost:
            raise ChannelLost("the box is gone")
        number = header["id"]
        if header["op"] == "exec":
            outputs: dict[int, int] = {}
            inputs: dict[int, int] = {}
            for place, fd in enumerate(fds):
                (inputs if place in INPUTS else outputs)[place] = os.dup(fd)
            for fd in outputs.values():
                os.set_blocking(fd, False)
            no_input = os.fstat(inputs[0]).st_rdev != 0
            if no_input:
                os.close(inputs.pop(0))
            self.post({**header, "no_input": no_input})
            self._outlets[number] = Outlet(self._loop, outputs)
            for place, fd in inputs.items():
                self._inlets[number, place] = Inlet(self, fd, number, place)
            return
        self._room[number] = header.get("limit_bytes", 0) + 1
        self.post(header, payload)
        if self._out and not self.lost:
            await asyncio.wait([self._written])

    async def send_raw(self, data: bytes) -> None:
        """Send bytes that are no frame: the runner's source, before it can read frames."""
        self._out += data
        self._on_writable()

    def send_now(self, header: dict[str, Any]) -> bool:
        """Send a small frame without waiting; False if the box is gone."""
        self.post(header)
        return not self.lost

    # --- from the box

    def _on_readable(self) -> None:
        try:
            data = os.read(self._ends[0], CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._buffer += data
        try:
            while not self.lost and self._take_frame():
                pass
        except (ValueError, KeyError, TypeError, RecursionError):
            self.close()

    def _take_frame(self) -> bool:
        """Take one frame off the buffer; raise ``ValueError`` on one that no runner sends."""
        if len(self._buffer) < 8:
            return False
        size, payload = struct.unpack_from("!II", self._buffer)
        if size > LARGEST_HEADER or payload > max(CHUNK, *self._room.values(), 0):
            raise ValueError("a frame beyond its limit")
        end = 8 + size + payload
        if len(self._buffer) < end:
            return False
        header = checked(json.loads(bytes(self._buffer[8 : 8 + size])))
        data = bytes(self._buffer[8 + size : end])
        del self._buffer[:end]
        self._handle(header, data)
        return True

    def _handle(self, header: dict[str, Any], data: bytes) -> None:
        number = header["id"]
        if header.get("took"):
            if inlet := self._inlets.get((number, header["stream"])):
                inlet.ask()
        elif "stream" in header:
            if outlet := self._outlets.get(number):
                outlet.put(header["stream"], data)
                if outlet.held > MOST_HELD:
                    self._loop.remove_reader(self._ends[0])
                    self._loop.call_later(0.005, self._go_on, outlet)
        elif waiter := self._waiting.pop(number, None):
            self._room.pop(number, None)
            for key in [key for key in self._inlets if key[0] == number]:
                self._inlets.pop(key).close()
            if outlet := self._outlets.pop(number, None):
                outlet.answer = (waiter, Answer(header, (), data))
                for place in (1, 2, 4):
                    outlet.put(place, b"")
                outlet.flush()
            elif not waiter.done():
                waiter.set_result(Answer(header, (), data))

    def _go_on(self, outlet: Outlet) -> None:
        """Read on once what was said before has been taken, or nobody will take it."""
        if self.lost:
            return
        if outlet.held > MOST_HELD:
            self._loop.call_later(0.005, self._go_on, outlet)
        elif not self._deaf:
            self._loop.add_reader(self._ends[0], self._on_readable)

    # --- while the box is recorded

    async def hold(self) -> None:
        """Have the runner stand still, with nothing under way; frames wait here from now on."""
        number, answer = self.expect()
        self.post({"op": "hold", "id": number})
        self._holding = True
        await answer

    async def attach(self, ends: tuple[int, int] | None = None) -> None:
        """Go on, with the restored box at ``ends`` or with the one that was held."""
        if ends is not None:
            self._detach()
            self._attach(ends)
        await self._go(copy=False)

    async def adopt(self) -> None:
        """Go on as the host of a copy."""
        await self._go(copy=True)

    async def _go(self, *, copy: bool) -> None:
        number, answer = self.expect()
        self._holding = False
        self.post({"op": "go", "id": number, "copy": copy})
        later, self._later = self._later, []
        for header, payload in later:
            self.post(header, payload)
        await answer

    def detach(self) -> None:
        """The held box is about to end; that is no loss."""
        self._deaf = True
        self._loop.remove_reader(self._ends[0])

    def _detach(self) -> None:
        for fd in self._ends:
            if fd >= 0:
                self._loop.remove_reader(fd)
                self._loop.remove_writer(fd)
                os.close(fd)
        self._ends = (-1, -1)

    def close(self) -> None:
        """Forget the box; whoever waits gets ``ChannelLost``. Idempotent."""
        if self.lost:
            return
        self.lost = True
        self._detach()
        for inlet in self._inlets.values():
            inlet.close()
        for outlet in self._outlets.values():
            outlet.flush()
            outlet.close()
        self._inlets.clear()
        self._outlets.clear()
        if not self._written.done():
            self._written.set_result(None)
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(ChannelLost("the box ended"))
                future.exception()


def checked(header: object) -> dict[str, Any]:
    """Return a header that is what a runner sends, or raise ``ValueError``."""
    if not isinstance(header, dict) or "id" not in header:
        raise ValueError("not a header")
    fields: dict[str, Any] = dict(header.items())  # pyright: ignore[reportUnknownArgumentType]
    for name, value in fields.items():
        if name not in FIELDS or not isinstance(value, FIELDS[name]):
            raise ValueError(f"no runner says {name}: {value!r}"[:200])
    return fields
