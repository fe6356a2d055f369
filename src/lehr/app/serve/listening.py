"""Runs the application on a socket, from the first request to a bounded end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING

import h11
from uvicorn import Config, Server
from uvicorn.protocols.http.h11_impl import H11Protocol

from lehr.app.serve.work import Service
from lehr.core.errors import ConfigError, LehrError

if TYPE_CHECKING:
    from starlette.applications import Starlette

HEADERS_S = 20.0
"""How long the headers of a request may take, and a connection may be silent before its first one."""
_GRACE_S = 3.0
_TICK_S = 0.05


def bind(host: str, port: int) -> socket.socket:
    """Return a socket bound to ``host``; port 0 is a free one. Raises :class:`ConfigError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot use the host {host!r}: {error}", hint="Take --host 127.0.0.1.") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        hint = "Take another --port; 0 picks a free one." if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}", hint=hint) from error
    return made


def address_of(bound: socket.socket) -> str:
    """Return the URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Server(Server):
    """Leaves signals to the command line, and says when it accepts connections."""

    def __init__(self, config: Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


class _Impatient(H11Protocol):
    """Closes connections that do not come to the end of a request's headers; what follows them has the
    request's own deadline.
    """

    _due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect headers from now on."""
        super().connection_made(transport)
        self._due = self.loop.call_later(HEADERS_S, transport.close)

    def data_received(self, data: bytes) -> None:
        """Expect headers for as long as none are complete."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._cancel()
        elif self._due is None:
            self._due = self.loop.call_later(HEADERS_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Expect nothing."""
        self._cancel()
        super().connection_lost(exc)

    def _cancel(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None


async def listen(
    app: Starlette,
    service: Service,
    bound: socket.socket,
    *,
    drain_s: float,
    ready: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Serve until cancelled. Then nothing new is taken, what runs gets ``drain_s``, and the rest is ended."""
    config = Config(
        app, lifespan="off", ws="none", http=_Impatient, log_config=None, access_log=False, server_header=False,
        timeout_graceful_shutdown=round(drain_s + _GRACE_S),
    )  # fmt: skip
    server = _Server(config, ready)
    serving = asyncio.create_task(server.serve([bound]))
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        service.stopping = True
        server.should_exit = True
        if service.requests:
            say(f"stopping: {service.requests} running requests have {drain_s:g} s left; Ctrl-C ends them now")
        await _drain(service, drain_s)
        await serving
        raise
    raise LehrError("the server ended by itself")


async def _drain(service: Service, drain_s: float) -> None:
    loop = asyncio.get_running_loop()
    ends = loop.time() + drain_s
    while service.requests and loop.time() < ends:
        await asyncio.sleep(_TICK_S)
    service.aborting.set()
