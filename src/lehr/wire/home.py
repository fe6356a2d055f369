"""The side that calls: binds a socket, takes roles in, sends requests and matches replies.

A role is expected under a name, an incarnation and a token before it dials in; whoever cannot show the
token is dropped. Every call has a deadline. A lost peer fails its pending calls at once.
"""

from __future__ import annotations

import asyncio
import fcntl
import hmac
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from lehr.core.errors import ConfigError, DeadlineExceeded, LehrError, RoleLost
from lehr.wire.codec import decode, encode
from lehr.wire.failures import error_of
from lehr.wire.message import (
    Bye,
    Cancel,
    Heartbeat,
    Hello,
    Message,
    Ready,
    Refused,
    Reply,
    Request,
    pack,
    unpack,
)
from lehr.wire.silence import Silence

HEARTBEAT_S = 1.0
SILENCE_LIMIT_S = 120.0
FOLDER_PREFIX = "lehr-home-"


class Peer:
    """One role as home knows it, from :meth:`Home.expect` until it is lost or has said goodbye."""

    def __init__(self, home: Home, name: str, incarnation: int, token: str, silence_limit_s: float) -> None:
        self.name = name
        self.incarnation = incarnation
        self.methods: tuple[str, ...] = ()
        self.identity: bytes | None = None
        self.silence = Silence(silence_limit_s, 2 * HEARTBEAT_S)
        self._home = home
        self._token = token
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._pending: dict[str, asyncio.Future[memoryview]] = {}

    def admits(self, hello: Hello) -> bool:
        """Return whether ``hello`` comes from the process that is expected."""
        right = hmac.compare_digest(hello.token.encode(), self._token.encode())
        return right and hello.incarnation == self.incarnation and self.identity is None

    @property
    def is_ready(self) -> bool:
        """Whether the role has said that it serves, or that it cannot."""
        return self._ready.done()

    async def ready(self, timeout_s: float) -> None:
        """Wait until the service is built. Raises the error that building it ended with."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._ready)
        except TimeoutError as error:
            if isinstance(error, LehrError):
                raise
            raise DeadlineExceeded(f"role {self.name!r} was not ready within {timeout_s:g} s") from error

    async def call(self, method: str, body: Any = None, *, returns: Any = None, timeout_s: float = 60.0) -> Any:
        """Send a request and return its answer, decoded as ``returns`` (None leaves it untyped)."""
        if self.ended.done():
            raise RoleLost(f"role {self.name!r} is gone: {self.ended.result()}")
        frame = b"" if body is None else encode(body)
        key = self._home.next_id()
        answer: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        self._pending[key] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self.send(Request(key, method, self.incarnation, timeout_s), frame)
                data = await answer
        except (TimeoutError, asyncio.CancelledError) as error:
            if isinstance(error, LehrError):
                raise
            if not self.ended.done():
                self._home.post(self, Cancel(key))
            if isinstance(error, asyncio.CancelledError):
                raise
            raise DeadlineExceeded(f"{self.name}.{method} did not answer within {timeout_s:g} s") from error
        finally:
            self._pending.pop(key, None)
        return decode(data, Any if returns is None else returns)

    async def send(self, message: Message, body: bytes = b"") -> None:
        """Send one message; the role must have said hello."""
        if self.identity is None:
            raise RoleLost(f"role {self.name!r} has not dialled home")
        await self._home.send(self.identity, pack(message), body)

    def take(self, message: Message, body: memoryview) -> None:
        """Act on a message of this peer."""
        self.silence.heard()
        match message:
            case Reply(id=key, failure=failure):
                answer = self._pending.get(key)
                if answer is not None and not answer.done():
                    if failure is None:
                        answer.set_result(body)
                    else:
                        answer.set_exception(error_of(failure))
            case Ready(methods=methods):
                self.methods = methods
                if not self._ready.done():
                    self._ready.set_result(None)
            case Refused(failure=failure):
                self.refuse(error_of(failure))
            case Bye():
                self.lose("it said goodbye")
            case _:
                pass

    def refuse(self, error: LehrError) -> None:
        """Let :meth:`ready` end with ``error``."""
        if not self._ready.done():
            self._ready.set_exception(error)
            self._ready.exception()

    def lose(self, detail: str) -> None:
        """Fail everything that waits for this peer. Idempotent."""
        if self.ended.done():
            return
        self.ended.set_result(detail)
        self.refuse(RoleLost(f"role {self.name!r} ended before it was ready: {detail}"))
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(RoleLost(f"role {self.name!r} was lost: {detail}"))
        self._home.forget(self)


class Home:
    """Owns the socket. Open it inside a running loop, close it there; closing loses every peer."""

    def __init__(self, *, on_silent: Callable[[Peer], None] | None = None) -> None:
        base = _short_folder()
        _remove_abandoned(base)
        self._folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=base))
        self._lock = _locked(self._folder)
        self.address = f"ipc://{self._folder}/home"
        self._context = zmq.asyncio.Context()
        self._socket: Any = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.set_hwm(0)
        self._socket.bind(self.address)
        self._on_silent = on_silent
        self._expected: dict[tuple[str, int], Peer] = {}
        self._peers: dict[bytes, Peer] = {}
        self._ids = itertools.count(1)
        self._prefix = os.urandom(6).hex()
        self._background: set[asyncio.Task[None]] = set()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]
        for task in self._tasks:
            task.add_done_callback(self._broke)

    def expect(
        self, name: str, incarnation: int, token: str, *, silence_limit_s: float = SILENCE_LIMIT_S
    ) -> Peer:
        """Announce a role that is about to dial in."""
        if (name, incarnation) in self._expected:
            raise ConfigError(f"role {name!r} with incarnation {incarnation} is expected already")
        peer = Peer(self, name, incarnation, token, silence_limit_s)
        self._expected[name, incarnation] = peer
        return peer

    def forget(self, peer: Peer) -> None:
        """Drop a peer's routes; whatever still comes from it is ignored."""
        self._expected.pop((peer.name, peer.incarnation), None)
        if peer.identity is not None:
            self._peers.pop(peer.identity, None)

    async def send(self, *frames: bytes) -> None:
        """Send one message: identity, envelope, body."""
        await self._socket.send_multipart(frames)

    def next_id(self) -> str:
        """Return a request id that no other request of any home has."""
        return f"{self._prefix}-{next(self._ids)}"

    def post(self, peer: Peer, message: Message) -> None:
        """Send without waiting, for a caller that is being cancelled."""

        async def send() -> None:
            await peer.send(message)

        task = asyncio.create_task(send())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self) -> None:
        """Lose every peer, close the socket, remove its folder. Idempotent."""
        for peer in list(self._expected.values()):
            peer.lose("home was closed")
        tasks = [*self._tasks, *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = []
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _broke(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            for peer in list(self._expected.values()):
                peer.lose(f"home broke: {type(error).__name__}: {error}")

    async def _receive(self) -> None:
        while True:
            frames = await self._socket.recv_multipart(copy=False)
            if len(frames) != 3:
                continue
            identity, body = frames[0].bytes, frames[2].buffer
            try:
                message = unpack(frames[1].buffer)
            except msgspec.DecodeError:
                continue
            peer = self._peers.get(identity)
            if peer is None and isinstance(message, Hello):
                peer = self._expected.get((message.role, message.incarnation))
                if peer is None or not peer.admits(message):
                    continue
                peer.identity = identity
                self._peers[identity] = peer
            if peer is not None:
                peer.take(message, body)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for peer in list(self._peers.values()):
                await peer.send(Heartbeat())
                if peer.silence.tick():
                    peer.lose("it fell silent")
                    if self._on_silent is not None:
                        self._on_silent(peer)


def _short_folder() -> str:
    """Return a folder whose path leaves room for a socket name (108 bytes in all)."""
    for folder in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        if folder and len(folder.encode()) < 60 and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise ConfigError("no folder for a socket", expected="/tmp or XDG_RUNTIME_DIR to be writable")


def _locked(folder: Path) -> int | None:
    """Return an open lock on ``folder`` that the kernel frees when we end, or None if another holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove_abandoned(base: str) -> None:
    """Remove the folders of homes that were killed: ours, with a socket, and no longer locked."""
    for folder in Path(base).glob(f"{FOLDER_PREFIX}*"):
        try:
            mine = folder.lstat().st_uid == os.getuid() and folder.is_dir() and (folder / "home").exists()
            lock = _locked(folder) if mine else None
        except OSError:
            continue
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
