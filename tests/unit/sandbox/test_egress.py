"""The way out of a box: only hosts that were allowed, only by the proxy, and everything is told."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from lehr.core.errors import ConfigError
from lehr.core.protocols import ListRecorder
from lehr.sandbox import egress
from lehr.sandbox.base import Limits, Spec
from lehr.sandbox.egress import Rule
from lehr.sandbox.lease import LeasedBox
from lehr.sandbox.pool import Pool

FETCH = """
import sys, urllib.error, urllib.request
for url in sys.argv[1:]:
    try:
        print(urllib.request.urlopen(url, timeout=8).read().decode())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
    except Exception as error:
        print(type(error).__name__, error)
"""
BARE = """
import socket, sys
end = socket.create_connection(("127.0.0.1", 3128), 5)
end.sendall(sys.argv[1].encode().decode("unicode_escape").encode("latin-1"))
end.settimeout(8)
answer = b""
while part := end.recv(4096):
    answer += part
print(answer.decode())
"""


@pytest.mark.parametrize(
    ("text", "host", "port", "covered"),
    [
        ("example.org", "example.org", 443, True),
        ("example.org", "example.org", 80, True),
        ("example.org", "example.org", 22, False),
        ("Example.ORG.", "example.org", 443, True),
        ("example.org", "www.example.org", 443, False),
        ("example.org", "notexample.org", 443, False),
        ("*.example.org", "www.example.org", 443, True),
        ("*.example.org", "a.b.example.org", 443, True),
        ("*.example.org", "example.org", 443, False),
        ("*.example.org", "example.org.attacker.net", 443, False),
        ("*.example.org", "notexample.org", 443, False),
        ("example.org:8443", "example.org", 8443, True),
        ("example.org:8443", "example.org", 443, False),
        ("10.0.0.7:81", "10.0.0.7", 81, True),
        ("[::1]:80", "::1", 80, True),
        ("::1", "::1", 443, True),
        ("[0:0:0::1]:80", "::1", 80, True),
        ("mirror.example:443=10.0.0.7", "mirror.example", 443, True),
    ],
)
def test_rules(text: str, host: str, port: int, covered: bool) -> None:
    assert Rule.parse(text).covers(host, port) is covered


@pytest.mark.parametrize(
    "text",
    [
        "",
        "*",
        "*.",
        "a b",
        "http://a",
        "a:0",
        "a:65536",
        "a:x",
        "a/b",
        "a@b",
        "x=nowhere",
        "10.0.0.7=10.0.0.8",
        "-",
        "a..b",
        "é.org",
    ],
)
def test_a_rule_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="is no host that a box can be allowed to reach"):
        Rule.parse(text)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("2606:2800:220:1::1", True), ("127.0.0.1", False), ("10.1.2.3", False),
        ("169.254.169.254", False), ("100.64.0.1", False), ("::1", False), ("fd00::1", False), 
        ("fe80::1%eth0", False),
        ("::ffff:127.0.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("2002:7f00:1::", False),
        ("64:ff9b::a9fe:a9fe", False), ("64:ff9b::5db8:d822", True), ("::7f00:1", False), ("fec0::1", False),
        ("::ffff:0:a00:1", False),
    ],
)  # fmt: skip
def test_addresses_of_the_public_internet(address: str, public: bool) -> None:
    assert egress._is_public(address) is public


def in_box(
    allow: Callable[[int], tuple[str, ...]],
    use: Callable[[LeasedBox, int, list[bytes]], Awaitable[None]],
    *,
    limits: Limits | None = None,
    recorder: ListRecorder | None = None,
) -> None:
    """Use a box that may reach what ``allow`` says of a server on this host."""

    async def run() -> None:
        seen: list[bytes] = []

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                seen.append(await reader.readuntil(b"\r\n\r\n"))
                body = 1000 * b"x" if b"GET /large" in seen[-1] else b"hello"
                writer.write(
                    b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
                )
                await writer.drain()
            except asyncio.IncompleteReadError:
                await asyncio.sleep(0.1)
            finally:
                writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        pool = Pool("bwrap", warm=0, recorder=recorder)
        try:
            spec = Spec(limits=limits or Limits(), allow_hosts=allow(port))
            async with pool.lease(spec) as box:
                await box.write("fetch.py", FETCH.encode())
                await box.write("bare.py", BARE.encode())
                await use(box, port, seen)
        finally:
            await pool.close()
            server.close()

    asyncio.run(run())


def test_s23_only_what_is_allowed_is_reached_and_each_attempt_is_recorded() -> None:
    recorder = ListRecorder()

    async def use(box: LeasedBox, port: int, seen: list[bytes]) -> None:
        urls = [f"http://mirror.test:{port}/a?b=c", "http://other.test/", f"http://mirror.test:{port + 1}/"]
        result = await box.exec(["python3", "fetch.py", *urls])
        lines = result.stdout.decode().splitlines()
        assert lines[0] == "hello"
        assert lines[1] == "403 this box may not reach other.test:80"
        assert lines[2] == f"403 this box may not reach mirror.test:{port + 1}"
        assert seen[0].startswith(b"GET /a?b=c HTTP/1.1\r\nHost: mirror.test:%d\r\n" % port)
        assert [(item.host, item.refused) for item in result.connections] == [
            ("mirror.test", ""),
            ("other.test", "this box may not reach other.test:80"),
            ("mirror.test", f"this box may not reach mirror.test:{port + 1}"),
        ]
        assert result.connections[0].received_bytes > 5 and result.connections[0].sent_bytes > 30
        assert not (await box.exec(["true"])).connections
        async with box.shell() as shell:
            told = await shell.run(f"python3 fetch.py http://mirror.test:{port}/")
            assert told.stdout == b"hello\n" and len(told.connections) == 1

    in_box(lambda port: (f"mirror.test:{port}=127.0.0.1",), use, recorder=recorder)
    (first, *_) = [fields for _, fields in recorder.events if fields.get("connections")]
    assert first["connections"][0]["host"] == "mirror.test"


def test_s23_there_is_no_way_around_the_proxy() -> None:
    async def use(box: LeasedBox, port: int, seen: list[bytes]) -> None:
        code = (
            "import socket\n"
            f"for place in (('127.0.0.1', {port}), ('93.184.216.34', 80), ('169.254.169.254', 80)):\n"
            "    try: print(socket.create_connection(place, 3))\n"
            "    except OSError as error: print(error.strerror or error)\n"
            "try: print(socket.getaddrinfo('mirror.test', 80))\n"
            "except OSError as error: print('no name')"
        )
        result = await box.exec(["python3", "-c", code])
        assert result.stdout.decode().splitlines() == [
            "Connection refused", "Network is unreachable", "Network is unreachable", "no name",
        ]  # fmt: skip
        assert not seen

    in_box(lambda port: (f"mirror.test:{port}=127.0.0.1",), use)


def test_a_rule_for_one_host_goes_before_one_for_many() -> None:
    async def use(box: LeasedBox, port: int, seen: list[bytes]) -> None:
        result = await box.exec(["python3", "fetch.py", f"http://mirror.test:{port}/"])
        assert result.stdout == b"hello\n", result

    in_box(lambda port: (f"*.test:{port}", f"mirror.test:{port}=127.0.0.1"), use)


def test_s23_a_name_that_leads_inside_is_refused() -> None:
    async def use(box: LeasedBox, port: int, seen: list[bytes]) -> None:
        result = await box.exec(
            ["python3", "fetch.py", f"http://localhost:{port}/"], env={"no_proxy": "", "NO_PROXY": ""}
        )
        assert b"which is not of the public internet" in result.stdout, result
        assert not seen

    in_box(lambda port: (f"localhost:{port}",), use)


def test_connect_carries_bytes_both_ways_and_is_cut_at_the_limit() -> None:
    async def use(box: LeasedBox, port: int, seen: list[bytes]) -> None:
        tunnel = f"CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\n\\r\\nGET /large HTTP/1.1\\r\\n\\r\\n"
        first = await box.exec(["python3", "bare.py", tunnel])
        assert first.stdout.startswith(b"HTTP/1.1 200 Connection established") and b"xxx" in first.stdout, first
        second = await box.exec(["python3", "bare.py", tunnel])
        assert b"used up what it may send and receive" in second.stdout, second

    in_box(lambda port: (f"127.0.0.1:{port}",), use, limits=Limits(network_bytes=1000))


@pytest.mark.parametrize(
    "request_text",
    [
        "GET / HTTP/1.1\\r\\n\\r\\n",
        "GET https://a.test/ HTTP/1.1\\r\\n\\r\\n",
        "GET http://user@a.test/ HTTP/1.1\\r\\n\\r\\n",
        "GET http://a.test:99999/ HTTP/1.1\\r\\n\\r\\n",
        "CONNECT a.test:x HTTP/1.1\\r\\n\\r\\n",
        "CONNECT [::1 HTTP/1.1\\r\\n\\r\\n",
        "nonsense\\r\\n\\r\\n",
        "GET http://a.test/ HTTP/1.1\\r\\nA: b\\x01\\r\\n\\r\\n",
        "GET http://a.test/\\x85 HTTP/1.1\\nX\\r\\n\\r\\n",
        f"CONNECT {'a' * 64}.test:443 HTTP/1.1\\r\\n\\r\\n",
        f"CONNECT {'.'.join(['a' * 60] * 5)}:443 HTTP/1.1\\r\\n\\r\\n",
        "GET http://[::1%\\x9b31m]/ HTTP/1.1\\r\\n\\r\\n",
    ],
)
def test_a_request_that_is_none_is_refused(request_text: str) -> None:
    async def use(box: LeasedBox, port: int, seen: list[bytes]) -> None:
        result = await box.exec(["python3", "bare.py", request_text])
        assert result.stdout.startswith(b"HTTP/1.1 400 Bad Request"), result
        assert not seen

    in_box(lambda port: ("a.test",), use)


LEAVE = """
import os, socket, sys
end = socket.create_connection(("127.0.0.1", 3128), 5)
end.sendall(f"CONNECT {sys.argv[1]} HTTP/1.1\\r\\n\\r\\n".encode())
end.recv(100)
end.sendall(b"secret")
os._exit(0)
"""


def test_a_connection_that_is_open_at_the_end_is_told() -> None:
    async def use(box: LeasedBox, port: int, seen: list[bytes]) -> None:
        await box.write("leave.py", LEAVE.encode())
        results = [await box.exec(["python3", "leave.py", f"127.0.0.1:{port}"])]
        await asyncio.sleep(0.3)
        results.append(await box.exec(["true"]))
        told = [item for result in results for item in result.connections]
        assert results[0].connections and not any(item.refused for item in told)
        assert sum(item.sent_bytes for item in told) == len(b"secret")

    in_box(lambda port: (f"127.0.0.1:{port}",), use)


def test_many_refusals_hide_no_connection() -> None:
    code = (
        "import socket, sys\n"
        "def ask(place):\n"
        "    end = socket.create_connection(('127.0.0.1', 3128), 5)\n"
        "    end.sendall(f'CONNECT {place} HTTP/1.1\\r\\n\\r\\n'.encode())\n"
        "    return end.recv(100)\n"
        "for number in range(300): ask(f'{sys.argv[1]}:1')\n"
        "print(ask(sys.argv[1] + ':' + sys.argv[2]).split()[1])\n"
        "for number in range(300): ask(f'{number}.test:443')\n"
        "print(ask(sys.argv[1] + ':' + sys.argv[2]).split()[1])"
    )

    async def use(box: LeasedBox, port: int, seen: list[bytes]) -> None:
        result = await box.exec(["python3", "-c", code, "127.0.0.1", str(port)])
        reached = [item for item in result.connections if not item.refused]
        assert (result.stdout, len(reached)) == (b"b'200'\nb'429'\n", 1), result.stdout
        assert len(result.connections) <= egress.MOST_REMEMBERED + egress.MOST_CONNECTIONS
        assert not (await box.exec(["true"])).connections

    in_box(lambda port: (f"127.0.0.1:{port}",), use, limits=Limits(wall_s=30))


def test_connections_without_end_cost_the_host_little() -> None:
    code = (
        "import socket\n"
        "while True:\n"
        "    end = socket.create_connection(('127.0.0.1', 3128))\n"
        "    end.sendall(b'CONNECT b.test:1 HTTP/1.1\\r\\n\\r\\n')\n"
        "    end.recv(1000)\n"
        "    print('.', end='', flush=True)"
    )

    async def use(box: LeasedBox, port: int, seen: list[bytes]) -> None:
        result = await box.exec(["python3", "-c", code], timeout_s=1)
        assert result.verdict == "timeout_wall" and 60 < len(result.stdout) < 250, result

    in_box(lambda port: ("a.test",), use)


def test_a_transfer_that_moves_one_way_alone_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(egress, "IDLE_S", 0.4)

    async def run() -> None:
        async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 12\r\n\r\n")
            try:
                for _ in range(12):
                    writer.write(b"x")
                    await asyncio.sleep(0.1)
            finally:
                writer.close()

        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        pool = Pool("bwrap", warm=0)
        async with pool.lease(Spec(allow_hosts=(f"mirror.test:{port}=127.0.0.1",))) as box:
            await box.write("fetch.py", FETCH.encode())
            result = await box.exec(["python3", "fetch.py", f"http://mirror.test:{port}/"])
            assert result.stdout == b"xxxxxxxxxxxx\n", result
        await pool.close()
        server.close()

    asyncio.run(run())


def test_no_byte_passes_beyond_the_limit_also_after_a_restore() -> None:
    async def use(box: LeasedBox, port: int, seen: list[bytes]) -> None:
        tunnel = f"CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\n\\r\\nGET /large HTTP/1.1\\r\\n\\r\\n"
        mark = await box.snapshot()
        first = await box.exec(["python3", "bare.py", tunnel])
        (told,) = first.connections
        assert told.sent_bytes + told.received_bytes == 100, told
        await box.restore(mark)
        second = await box.exec(["python3", "bare.py", tunnel])
        assert b"used up what it may send and receive" in second.stdout, second
        await mark.discard()

    in_box(lambda port: (f"127.0.0.1:{port}",), use, limits=Limits(network_bytes=100))


def test_name_servers_that_do_not_answer_hold_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def slow(host: str, *_: object, **__: object) -> None:
        asked.append(host)
        time.sleep(1.5)
        raise OSError("no answer")

    code = (
        "import socket, time\n"
        "ends = [socket.create_connection(('127.0.0.1', 3128), 5) for _ in range(20)]\n"
        "for end in ends: end.sendall(b'CONNECT a.test:443 HTTP/1.1\\r\\n\\r\\n')\n"
        "time.sleep(1)"
    )

    async def use(box: LeasedBox, port: int, seen: list[bytes]) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", slow)
        running = asyncio.create_task(box.exec(["python3", "-c", code]))
        while not asked:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        began = time.monotonic()
        await asyncio.gather(*(asyncio.to_thread(int) for _ in range(4)))
        assert time.monotonic() - began < 0.5
        assert len(asked) <= egress.LOOKUPS
        result = await running
        assert {item.refused for item in result.connections} == {"was not reached before the call ended"}

    in_box(lambda port: ("a.test",), use)


def test_closing_leaves_the_number_of_the_socket_to_others() -> None:
    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        number = listener.fileno()
        way_out = egress.Egress(listener, (), 0)
        await asyncio.sleep(0.01)
        way_out.close()
        ours, theirs = socket.socketpair()
        assert number in (ours.fileno(), theirs.fileno())
        if theirs.fileno() == number:
            ours, theirs = theirs, ours
        heard = asyncio.Event()
        asyncio.get_running_loop().add_reader(ours, heard.set)
        theirs.send(b"x")
        async with asyncio.timeout(1):
            await heard.wait()
        asyncio.get_running_loop().remove_reader(ours)
        ours.close()
        theirs.close()

    asyncio.run(run())


def test_many_connections_and_a_box_that_goes_leave_nothing_open() -> None:
    async def run() -> None:
        pool = Pool("bwrap", warm=0)
        code = (
            "import socket\n"
            "ends = [socket.create_connection(('127.0.0.1', 3128), 5) for _ in range(60)]\n"
            "for end in ends: end.settimeout(3)\n"
            "closed = 0\n"
            "for end in ends[40:]:\n"
            "    try: closed += end.recv(1) == b''\n"
            "    except OSError: pass\n"
            "print(closed > 0)"
        )
        async with pool.lease(Spec(allow_hosts=("a.test",))) as box:
            result = await box.exec(["python3", "-c", code])
            assert result.stdout == b"True\n", result
        await pool.close()

    before = _descriptors()
    asyncio.run(run())
    assert _descriptors() == before


def _descriptors() -> int:
    import os

    return len(os.listdir("/proc/self/fd"))


def test_without_allowed_hosts_there_is_no_proxy() -> None:
    async def run() -> None:
        pool = Pool("bwrap", warm=0)
        async with pool.lease(Spec()) as box:
            code = (
                "import os, socket\nprint(os.environ.get('http_proxy'))\n"
                "socket.create_connection(('127.0.0.1', 3128))"
            )
            result = await box.exec(["python3", "-c", code])
            assert result.stdout == b"None\n" and b"Connection refused" in result.stderr
        await pool.close()

    asyncio.run(run())


def test_a_bad_rule_is_refused_before_a_box_is_made() -> None:
    async def run() -> None:
        pool = Pool("bwrap", warm=0)
        with pytest.raises(ConfigError, match="is no host"):
            await pool.acquire(Spec(allow_hosts=("http://x",)))
        await pool.close()

    asyncio.run(run())


def test_the_two_ends_agree_on_the_port() -> None:
    from lehr.sandbox.inside import rights

    assert rights.PROXY == ("127.0.0.1", egress.PORT)
    assert socket.inet_aton(rights.PROXY[0])
