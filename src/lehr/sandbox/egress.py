"""The way out of a box that may reach some hosts: an HTTP proxy outside of it, which lets nothing else through.

The box has no network but its own loopback. On it listens a socket that process 1 made and gave to the host,
so that every connection a program makes to ``http://127.0.0.1:3128`` is ours. CONNECT and plain HTTP requests
(RFC 9112, section 3.2.2) are taken; names are resolved here, once, and an address that is not of the public
internet is refused unless the rule names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from lehr.core.errors import ConfigError
from lehr.sandbox.base import Connection

PORT = 3128
"""Where it listens inside; ``inside/rights.py`` has the same number."""
DEFAULT_PORT = 80
DEFAULT_PORTS = frozenset({DEFAULT_PORT, 443})
HEAD_S, CONNECT_S, IDLE_S = 10.0, 10.0, 120.0
MOST_CONNECTIONS = 32
MOST_REMEMBERED = 256
MOST_ADDRESSES = 4
HEAD_BYTES = 32 << 10
CHUNK = 64 << 10
HOST = re.compile(
    r"(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?", re.IGNORECASE
)
HOP = frozenset({b"connection", b"proxy-connection", b"proxy-authorization", b"keep-alive", b"host"})
"""Headers that are ours to set, or that end here."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Hosts that may be reached. host: lower case; with ``*.`` in front every name below it, not itself.

    address: where it is, whatever name servers say; empty to ask them.
    """

    host: str
    ports: frozenset[int]
    address: str = ""

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read ``example.org``, ``*.example.org:8443``, ``10.0.0.7:80``, ``[::1]:80`` or, for a host
        that is not of the public internet, ``mirror.example:443=10.0.0.7``; 80 and 443 are meant where no port
        is given. Raises ``ConfigError``.
        """
        name, equals, address = text.partition("=")
        host, colon, port = name.rpartition(":")
        if not colon or "]" in port or (name.count(":") > 1 and not name.startswith("[")):
            host, port = name, ""
        try:
            ports = frozenset({int(port)}) if port else DEFAULT_PORTS
        except ValueError:
            ports = frozenset({0})
        host = host.strip("[]").lower().rstrip(".")
        known = _address(host)
        fits = known or HOST.fullmatch(host)
        if not fits or not all(0 < number < 65536 for number in ports) or (equals and not _address(address)):
            raise ConfigError(
                f"{text!r} is no host that a box can be allowed to reach",
                expected="a name, *.name or an address, with :PORT if it is neither 80 nor 443, and with "
                "=ADDRESS if that is not of the public internet",
            )
        return cls(host, ports, host if known else address)

    def covers(self, host: str, port: int) -> bool:
        """Whether it allows that."""
        below = self.host.startswith("*.") and host.endswith(self.host[1:]) and len(host) > len(self.host) - 1
        return port in self.ports and (host == self.host or below)


def environment() -> Mapping[str, str]:
    """Return the variables by which programs find the proxy."""
    url = f"http://127.0.0.1:{PORT}"
    local = "localhost,127.0.0.1,::1"
    names = {"http_proxy": url, "https_proxy": url, "no_proxy": local}
    return {**names, **{name.upper(): value for name, value in names.items()}}


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


class Denied(Exception):
    """A request that is not carried out. status: of the HTTP answer."""

    def __init__(self, status: str, why: str) -> None:
        self.status = status
        self.why = why
        super().__init__(why)


@dataclass(slots=True)
class _Flow:
    """Bytes of one connection: sent by the box, received by it."""

    sent: int = 0
    received: int = 0


class Egress:
    """One box's way out. Life cycle: made with the listening socket, which it owns; :meth:`close`.

    limit_bytes: how much may pass, both ways together, in the life of the box.
    """

    def __init__(self, listener: socket.socket, allowed: Sequence[str], limit_bytes: int) -> None:
        self._listener = listener
        self._rules = [Rule.parse(text) for text in allowed]
        self._left = limit_bytes
        self._open: set[asyncio.Task[None]] = set()
        self._seen: list[Connection] = []
        listener.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def begin(self) -> None:
        """Forget the connections that were seen before."""
        self._seen.clear()

    @property
    def connections(self) -> tuple[Connection, ...]:
        """What was asked for since, in the order of the end."""
        return tuple(self._seen)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                end, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(0.05)  # no descriptors left, for example
                continue
            if len(self._open) >= MOST_CONNECTIONS:
                end.close()
                continue
            task = loop.create_task(self._serve(end))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _serve(self, end: socket.socket) -> None:
        began, flow = asyncio.get_running_loop().time(), _Flow()
        host, port, refused = "", 0, ""
        try:
            reader, writer = await asyncio.open_connection(sock=end, limit=HEAD_BYTES)
        except OSError:
            end.close()
            return
        try:
            try:
                method, target, headers = await _head(reader)
                host, port = _aim(method, target)
                outside = await self._connect(host, port)
            except Denied as error:
                refused = error.why
                body = f"{error.why}\n".encode()
                start = f"HTTP/1.1 {error.status}\r\nContent-Type: text/plain\r\nConnection: close\r\n"
                writer.write(f"{start}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(HEAD_S):
                        await writer.drain()
                return
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                head = _onward(method, target, host, port, headers)
                self._count(flow, "sent", len(head))
                outside[1].write(head)
            await self._carry((reader, writer), outside, flow)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            refused = refused or "broken off"
        finally:
            writer.close()
            if host and len(self._seen) < MOST_REMEMBERED:
                seconds = asyncio.get_running_loop().time() - began
                self._seen.append(Connection(host, port, refused, flow.sent, flow.received, seconds))

    async def _connect(self, host: str, port: int) -> Streams:
        rule = next((rule for rule in self._rules if rule.covers(host, port)), None)
        if rule is None:
            raise Denied("403 Forbidden", f"this box may not reach {host}:{port}")
        if self._left <= 0:
            raise Denied("403 Forbidden", "this box has used up what it may send and receive")
        why = ""
        for item in [rule.address] if rule.address else await _public(host, port):
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(item, port, limit=CHUNK)
                return reader, writer
            except (OSError, TimeoutError) as error:
                why = str(error) or "no answer in time"
        raise Denied("502 Bad Gateway", f"cannot reach {host}:{port}: {why}")

    def _count(self, flow: _Flow, direction: str, size: int) -> None:
        self._left -= size
        setattr(flow, direction, getattr(flow, direction) + size)

    async def _carry(self, inside: Streams, outside: Streams, flow: _Flow) -> None:
        """Pass bytes both ways until both have ended, nothing moves, or the limit is reached."""

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
            while self._left > 0:
                async with asyncio.timeout(IDLE_S):
                    data = await reader.read(CHUNK)
                    if not data:
                        break
                    self._count(flow, direction, len(data))
                    writer.write(data)
                    await writer.drain()
            with contextlib.suppress(OSError):
                writer.write_eof()

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(pass_on(inside[0], outside[1], "sent"))
                group.create_task(pass_on(outside[0], inside[1], "received"))
        except* (OSError, TimeoutError):
            pass
        finally:
            outside[1].close()

    def close(self) -> None:
        """End every connection. Idempotent."""
        self._accepting.cancel()
        for task in self._open:
            task.cancel()
        self._listener.close()


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _public(host: str, port: int) -> list[str]:
    """Return the first few addresses of a host, all of the public internet."""
    try:
        async with asyncio.timeout(CONNECT_S):
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError) as error:
        raise Denied("502 Bad Gateway", f"{host} has no address: {error}") from error
    addresses = [str(place[4][0]) for place in found]
    public = [item for item in addresses if _is_public(item)]
    if not public:
        raise Denied("403 Forbidden", f"{host} leads to {addresses[0]}, which is not of the public internet")
    return public[:MOST_ADDRESSES]


def _is_public(address: str) -> bool:
    known = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(known, "ipv4_mapped", None) or getattr(known, "sixtofour", None)
    return known.is_global and not known.is_multicast and (inner is None or inner.is_global)


async def _head(reader: asyncio.StreamReader) -> tuple[str, str, list[tuple[bytes, bytes]]]:
    """Read a request's first line and headers."""
    try:
        async with asyncio.timeout(HEAD_S):
            data = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError) as error:
        raise Denied("400 Bad Request", "no HTTP request") from error
    first, *lines = data[:-4].split(b"\r\n")
    words = first.decode("latin-1").split(" ")
    headers = [(name.strip(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise Denied("400 Bad Request", "no HTTP/1.1 request")
    if any(byte < 32 or byte == 127 for line in (first, *lines) for byte in line if byte != 9):
        raise Denied("400 Bad Request", "control characters in the head of a request")
    return words[0], words[1], headers


def _aim(method: str, target: str) -> tuple[str, int]:
    """Return host and port that a request is for."""
    try:
        parts = urlsplit(f"//{target}" if method == "CONNECT" else target)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise Denied("400 Bad Request", f"cannot read the address {target[:200]!r}") from error
    if method != "CONNECT" and parts.scheme != "http":
        raise Denied("400 Bad Request", "expected CONNECT, or a request for an http:// address")
    if not host or "@" in parts.netloc or not (_address(host) or HOST.fullmatch(host)):
        raise Denied("400 Bad Request", f"cannot read the address {target[:200]!r}")
    return host.lower().rstrip("."), port if port is not None else 443 if method == "CONNECT" else DEFAULT_PORT


def _onward(method: str, target: str, host: str, port: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return a plain request's head for the server: for one request, and the host that was checked."""
    parts = urlsplit(target)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    place = (f"[{host}]" if ":" in host else host) + (f":{port}" if port != DEFAULT_PORT else "")
    lines = [f"{method} {path} HTTP/1.1".encode("latin-1"), f"Host: {place}".encode()]
    lines += [name + b": " + value for name, value in headers if name.lower() not in HOP]
    return b"\r\n".join([*lines, b"Connection: close", b"", b""])
