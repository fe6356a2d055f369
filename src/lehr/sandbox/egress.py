"""The way out of a box that may reach some hosts: an HTTP proxy outside of it, which lets nothing else through.

The box has no network but its own loopback. On it listens a socket that process 1 made and gave to the host,
so that every connection a program makes to ``http://127.0.0.1:3128`` is ours. CONNECT and plain HTTP requests
(RFC 9112, section 3.2.2) are taken; names are resolved here, once, and an address that is not of the public
internet is refused unless the rule names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import re
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
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
"""How many attempts are told one by one; then those that are alike are told together, and beyond it refused."""
PROMPTLY, PAUSE_S = 64, 0.01
"""How many connections of one call are taken without delay, and the delay of each one after them."""
LOOKING_UP = ThreadPoolExecutor(16, "lehr-names")
"""Threads of their own: name servers that do not answer hold up nothing else of the host."""
LOOKUPS = 2
"""How many names one box may have looked up at once."""
MOST_ADDRESSES = 4
HEAD_BYTES = 32 << 10
CHUNK = 64 << 10
LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
HOST = re.compile(rf"(?=.{{1,253}}\.?$)(?:\*\.)?{LABEL}(?:\.{LABEL})*\.?", re.IGNORECASE | re.ASCII)
INNER = tuple(map(ipaddress.IPv6Network, ("::/96", "::ffff:0:0:0/96", "64:ff9b::/96")))
"""Addresses that end in one of IPv4 and lead there, beside those that Python knows."""
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
        if (
            not fits
            or not all(0 < number < 65536 for number in ports)
            or (equals and (known or not _address(address)))
        ):
            raise ConfigError(
                f"{text!r} is no host that a box can be allowed to reach",
                expected="a name, *.name or an address, with :PORT if it is neither 80 nor 443, and with "
                "=ADDRESS if that is not of the public internet",
            )
        host = str(known or host)
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
class _Attempt:
    """One attempt to reach a host, with the bytes that passed since it was told last."""

    host: str
    port: int
    began: float
    refused: str = "was not reached before the call ended"
    sent: int = 0
    received: int = 0
    over_s: float | None = None
    told: str | None = None


class Egress:
    """One box's way out. Life cycle: made with the listening socket, which it owns; :meth:`close`.

    limit_bytes: how much may pass, both ways together, in the life of the box.
    """

    def __init__(self, listener: socket.socket, allowed: Sequence[str], limit_bytes: int) -> None:
        self._listener = listener
        self._rules = [Rule.parse(text) for text in allowed]
        self._left = limit_bytes
        self._open: set[asyncio.Task[None]] = set()
        self._attempts: list[_Attempt] = []
        self._taken = 0
        self._lookups = asyncio.Semaphore(LOOKUPS)
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        self._accepting = self._loop.create_task(self._accept())

    def follow(self, other: Egress) -> None:
        """Go on where that of the same box before stopped."""
        self._left, self._attempts = other._left, other._attempts + self._attempts

    def take(self) -> tuple[Connection, ...]:
        """Return what was asked for, and what passed, since it was called last, in the order of asking."""
        found: list[Connection] = []
        for item in self._attempts:
            if item.sent or item.received or item.told != item.refused:
                seconds = self._loop.time() - item.began if item.over_s is None else item.over_s
                found.append(Connection(item.host, item.port, item.refused, item.sent, item.received, seconds))
            item.sent, item.received, item.told = 0, 0, item.refused
        self._attempts = [item for item in self._attempts if item.over_s is None]
        self._taken = 0
        return tuple(found)

    def _end(self, attempt: _Attempt) -> None:
        """An attempt is over. Where there are many, it is told with one like it."""
        attempt.over_s = self._loop.time() - attempt.began
        if len(self._attempts) > MOST_REMEMBERED:
            facts = attempt.host, attempt.port, attempt.refused
            for item in self._attempts:
                if (
                    item.over_s is not None
                    and item is not attempt
                    and facts == (item.host, item.port, item.refused)
                ):
                    item.sent += attempt.sent
                    item.received += attempt.received
                    item.over_s += attempt.over_s
                    self._attempts = [other for other in self._attempts if other is not attempt]
                    return

    async def _accept(self) -> None:
        loop = self._loop
        while True:
            self._taken += 1
            if self._taken > PROMPTLY:
                await asyncio.sleep(PAUSE_S)
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
        attempt: _Attempt | None = None
        try:
            reader, writer = await asyncio.open_connection(sock=end, limit=HEAD_BYTES)
        except OSError:
            end.close()
            return
        try:
            try:
                method, target, headers = await _head(reader)
                host, port = _aim(method, target)
                attempt = self._begin(host, port)
                outside = await self._connect(host, port)
            except Denied as error:
                if attempt:
                    attempt.refused = error.why
                body = f"{error.why}\n".encode()
                start = f"HTTP/1.1 {error.status}\r\nContent-Type: text/plain\r\nConnection: close\r\n"
                writer.write(f"{start}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(HEAD_S):
                        await writer.drain()
                return
            attempt.refused = ""
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
                head = b""
            else:
                head = _onward(method, target, host, port, headers)
            await self._carry((reader, writer), outside, attempt, head)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            if attempt:
                attempt.refused = attempt.refused or "broken off"
        finally:
            writer.close()
            if attempt:
                self._end(attempt)

    def _begin(self, host: str, port: int) -> _Attempt:
        if len(self._attempts) >= MOST_REMEMBERED + MOST_CONNECTIONS:
            raise Denied("429 Too Many Requests", "one call asked for too many hosts to tell them all")
        attempt = _Attempt(host, port, self._loop.time())
        self._attempts.append(attempt)
        return attempt

    async def _connect(self, host: str, port: int) -> Streams:
        found = [rule for rule in self._rules if rule.covers(host, port)]
        rule = min(found, key=lambda rule: rule.host.startswith("*."), default=None)
        if rule is None:
            raise Denied("403 Forbidden", f"this box may not reach {host}:{port}")
        if self._left <= 0:
            raise Denied("403 Forbidden", "this box has used up what it may send and receive")
        why = ""
        for item in [rule.address] if rule.address else await self._public(host, port):
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(item, port, limit=CHUNK)
                return reader, writer
            except (OSError, TimeoutError) as error:
                why = str(error) or "no answer in time"
        raise Denied("502 Bad Gateway", f"cannot reach {host}:{port}: {why}")

    async def _public(self, host: str, port: int) -> list[str]:
        """Return the first few addresses of a host, all of the public internet."""
        ask = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
        try:
            async with asyncio.timeout(CONNECT_S):
                await self._lookups.acquire()
                looking = self._loop.run_in_executor(LOOKING_UP, ask)
                looking.add_done_callback(self._looked_up)
                found = await asyncio.shield(looking)
        except (OSError, TimeoutError, UnicodeError) as error:
            raise Denied("502 Bad Gateway", f"{host} has no address: {error}") from error
        addresses = [str(place[4][0]) for place in found]
        public = [item for item in addresses if _is_public(item)]
        if not public:
            raise Denied(
                "403 Forbidden", f"{host} leads to {addresses[0]}, which is not of the public internet"
            )
        return public[:MOST_ADDRESSES]

    def _looked_up(self, done: asyncio.Future[Any]) -> None:
        self._lookups.release()
        if not done.cancelled():
            done.exception()  # nobody may be waiting for it any more

    def _count(self, attempt: _Attempt, direction: str, data: bytes) -> bytes:
        """Return as much of what is to pass as still may."""
        data = data[: self._left]
        self._left -= len(data)
        setattr(attempt, direction, getattr(attempt, direction) + len(data))
        return data

    async def _carry(self, inside: Streams, outside: Streams, attempt: _Attempt, head: bytes) -> None:
        """Pass bytes both ways until both have ended, nothing moves either way, or the limit is reached."""

        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: str) -> None:
            while self._left > 0:
                data = self._count(attempt, direction, await reader.read(CHUNK))
                idle.reschedule(self._loop.time() + IDLE_S)
                if not data:
                    break
                writer.write(data)
                await writer.drain()
                idle.reschedule(self._loop.time() + IDLE_S)
            with contextlib.suppress(OSError):
                writer.write_eof()

        try:
            outside[1].write(self._count(attempt, "sent", head))
            async with asyncio.timeout(IDLE_S) as idle, asyncio.TaskGroup() as group:
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
        self._loop.remove_reader(self._listener)  # before its number may be another's
        self._listener.close()


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def _is_public(address: str) -> bool:
    known = ipaddress.ip_address(address.partition("%")[0])
    inner = None
    if isinstance(known, ipaddress.IPv6Address):
        inner = known.ipv4_mapped or known.sixtofour
        if any(known in network for network in INNER):
            inner = ipaddress.IPv4Address(int(known) & 0xFFFFFFFF)
        if known.is_site_local:
            return False
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
    if not host or "@" in parts.netloc or "%" in host or not (_address(host) or HOST.fullmatch(host)):
        raise Denied("400 Bad Request", f"cannot read the address {target[:200]!r}")
    return str(
        _address(host) or host.lower().rstrip(".")
    ), port if port is not None else 443 if method == "CONNECT" else DEFAULT_PORT


def _onward(method: str, target: str, host: str, port: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return a plain request's head for the server: for one request, and the host that was checked."""
    parts = urlsplit(target)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    place = (f"[{host}]" if ":" in host else host) + (f":{port}" if port != DEFAULT_PORT else "")
    lines = [f"{method} {path} HTTP/1.1".encode("latin-1"), f"Host: {place}".encode()]
    lines += [name + b": " + value for name, value in headers if name.lower() not in HOP]
    return b"\r\n".join([*lines, b"Connection: close", b"", b""])
