"""The side that answers: dials home, builds its service, and runs its methods as requests come in.

A service is any object. Its public coroutine methods are the requests; each takes at most one argument,
whose annotation says how the body is decoded. An exception of a method becomes a typed failure.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import traceback
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, get_type_hints

from lehr.core.errors import ConfigError, DeadlineExceeded, Failure, LehrError, UnknownName
from lehr.wire.codec import CodecError, decode, encode
from lehr.wire.failures import BadRequest
from lehr.wire.link import Link
from lehr.wire.message import Bye, Cancel, Hello, Message, Ready, Refused, Reply, Request

CLOSE_LIMIT_S = 5.0
REMEMBERED = 1024
REMEMBERED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Method:
    """One request that a service answers. ``kind`` is the type of its argument, if it takes one."""

    call: Callable[..., Awaitable[Any]]
    takes: bool
    kind: Any = None


def methods_of(service: object) -> dict[str, Method]:
    """Return the requests of ``service`` by name. Raises :class:`ConfigError` for one that cannot be served."""
    found: dict[str, Method] = {}
    for name in dir(type(service)):
        function = getattr(type(service), name)
        if name.startswith("_") or name == "close" or not inspect.iscoroutinefunction(function):
            continue
        bound = getattr(service, name)
        where = f"{type(service).__name__}.{name}"
        arguments = list(inspect.signature(bound).parameters)
        if len(arguments) > 1:
            raise ConfigError(f"{where} takes {len(arguments)} arguments", expected="at most one")
        try:
            hints = get_type_hints(function)
        except NameError as error:
            raise ConfigError(f"the annotations of {where} cannot be read: {error}") from error
        if arguments and arguments[0] not in hints:
            raise ConfigError(f"{where} has no annotation for {arguments[0]!r}")
        found[name] = Method(bound, bool(arguments), hints.get(arguments[0]) if arguments else None)
    return found


class Answers:
    """The last replies by request id, so that a repeated request gets the recorded one.

    Bounded in number and bytes; an answer larger than the bound is not kept.
    """

    def __init__(self, count: int = REMEMBERED, limit_bytes: int = REMEMBERED_BYTES) -> None:
        self._count = count
        self._limit_bytes = limit_bytes
        self._bytes = 0
        self._kept: OrderedDict[str, tuple[Reply, bytes]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: str) -> tuple[Reply, bytes] | None:
        """Return the reply and body recorded for ``key``."""
        return self._kept.get(key)

    def keep(self, reply: Reply, body: bytes) -> None:
        """Record a reply, forgetting the oldest beyond the bounds."""
        if len(body) > self._limit_bytes:
            return
        self._kept[reply.id] = (reply, body)
        self._bytes += len(body)
        while len(self._kept) > self._count or self._bytes > self._limit_bytes:
            _, (_, old) = self._kept.popitem(last=False)
            self._bytes -= len(old)


async def serve(
    make: Callable[[], Any],
    address: str,
    token: str,
    name: str,
    incarnation: int,
    *,
    parent: int | None = None,
    silence_limit_s: float = 3600.0,
) -> None:
    """Dial ``address``, build the service with ``make`` (sync or async) and answer until home says goodbye
    or is gone. The service's ``close`` coroutine, if it has one, is awaited at the end.

    parent: process id of home when it is on this machine; the role ends when it is no longer our parent.
    """
    loop = asyncio.get_running_loop()
    server = _Server(name, incarnation)
    hello = Hello(name, incarnation, token, os.getpid())
    link = Link(address, hello, loop, server.take, parent=parent, silence_limit_s=silence_limit_s)
    server.link = link
    link.start()
    try:
        try:
            service = make()
            if inspect.isawaitable(service):
                service = await service
            server.methods = methods_of(service)
        except Exception as error:
            traceback.print_exc()
            link.send(Refused(Failure.of(error)))
            return
        link.send(Ready(tuple(server.methods)))
        await server.over.wait()
        await server.cancel_all()
        close = getattr(service, "close", None)
        if close is not None:
            closing = close()
            if inspect.isawaitable(closing):
                await asyncio.wait_for(closing, CLOSE_LIMIT_S)
        link.send(Bye())
    finally:
        await asyncio.to_thread(link.stop)


class _Server:
    def __init__(self, name: str, incarnation: int) -> None:
        self.name = name
        self.incarnation = incarnation
        self.methods: dict[str, Method] = {}
        self.over = asyncio.Event()
        self.link: Link | None = None
        self._answers = Answers()
        self._running: dict[str, asyncio.Task[None]] = {}

    def take(self, message: Message, body: memoryview) -> None:
        """Act on a message from home; called in the event loop."""
        match message:
            case Request():
                known = self._answers.get(message.id)
                if known is not None:
                    self._send(*known)
                elif message.id not in self._running:
                    task = asyncio.create_task(self._handle(message, body))
                    self._running[message.id] = task
                    task.add_done_callback(lambda _: self._running.pop(message.id, None))
            case Cancel(id=key):
                task = self._running.get(key)
                if task is not None:
                    task.cancel()
            case Bye():
                self.over.set()
            case _:
                pass

    async def cancel_all(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_LIMIT_S)

    def _send(self, reply: Reply, body: bytes) -> None:
        if self.link is not None:
            self.link.send(reply, body)

    async def _handle(self, request: Request, body: memoryview) -> None:
        data = b""
        try:
            data = await self._answer(request, body)
            reply = Reply(request.id)
        except Exception as error:  # the border of the process: failure goes on as data
            if not isinstance(error, LehrError):
                print(f"{self.name}.{request.method} failed:", file=sys.stderr)
                traceback.print_exc()
            reply = Reply(request.id, Failure.of(error))
        self._answers.keep(reply, data)
        self._send(reply, data)

    async def _answer(self, request: Request, body: memoryview) -> bytes:
        what = f"{self.name}.{request.method}"
        if request.incarnation != self.incarnation:
            meant = f"incarnation {request.incarnation} of the role"
            raise BadRequest(f"{what} was meant for {meant}, this is {self.incarnation}")
        method = self.methods.get(request.method)
        if method is None:
            raise BadRequest(str(UnknownName.among("method", what, (f"{self.name}.{m}" for m in self.methods))))
        arguments: list[Any] = []
        if method.takes:
            try:
                arguments = [decode(body, method.kind) if len(body) else None]
            except CodecError as error:
                raise BadRequest(f"the body of {what} cannot be read: {error}") from error
        elif len(body):
            raise BadRequest(f"{what} takes no argument")
        limit = asyncio.timeout(request.remaining_s)
        try:
            async with limit:
                return encode(await method.call(*arguments))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise DeadlineExceeded(f"{what} ran past its {request.remaining_s:g} s") from error
