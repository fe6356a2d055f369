"""Home and role in one process, and a role made by hand that does not keep to the rules."""

import asyncio
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from lehr.core.clock import VirtualClock
from lehr.core.errors import (
    ConfigError,
    DeadlineExceeded,
    Diverged,
    Failure,
    LehrError,
    OutOfSpace,
    RoleLost,
    UnknownName,
)
from lehr.engine.base import RequestTooLarge
from lehr.wire import home as home_module
from lehr.wire.codec import decode, encode
from lehr.wire.failures import BadRequest, RemoteError, error_of
from lehr.wire.home import Home, Peer
from lehr.wire.message import Bye, Cancel, Hello, Ready, Reply, Request, pack, unpack
from lehr.wire.serve import Answers, methods_of, serve
from lehr.wire.silence import Silence

TOKEN = "secret"


class Counter:
    def __init__(self) -> None:
        self.n = 0
        self.closed = False
        self.cancelled = asyncio.Event()

    async def add(self, by: int) -> int:
        self.n += by
        return self.n

    async def large(self) -> None:
        raise RequestTooLarge("too large")

    async def wait(self) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def close(self) -> None:
        self.closed = True


class RawRole:
    """A DEALER that speaks the messages by hand."""

    def __init__(self, address: str) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(address)

    async def send(self, message: Any, body: bytes = b"") -> None:
        await self.socket.send_multipart([pack(message), body])

    async def receive(self, kind: type[Any]) -> tuple[Any, bytes]:
        while True:
            envelope, body = await asyncio.wait_for(self.socket.recv_multipart(), 5)
            message = unpack(envelope)
            if isinstance(message, kind):
                return message, body

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


class RawHome:
    """A ROUTER that speaks the messages by hand."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.asyncio.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.address = f"ipc://{folder}/h"
        self.socket.bind(self.address)
        self.identity = b""

    async def send(self, message: Any, body: bytes = b"") -> None:
        await self.socket.send_multipart([self.identity, pack(message), body])

    async def receive(self, kind: type[Any]) -> tuple[Any, bytes]:
        while True:
            self.identity, envelope, body = await asyncio.wait_for(self.socket.recv_multipart(), 5)
            message = unpack(envelope)
            if isinstance(message, kind):
                return message, body

    def close(self) -> None:
        self.socket.close(linger=0)
        self.context.term()


def with_home(body: Callable[[Home], Awaitable[None]]) -> None:
    async def main() -> None:
        home = Home()
        try:
            await body(home)
        finally:
            await home.close()

    asyncio.run(main())


def serving(body: Callable[[Home, Peer, Counter, "asyncio.Task[None]"], Awaitable[None]]) -> None:
    async def main(home: Home) -> None:
        service = Counter()
        peer = home.expect("counter", 1, TOKEN)
        task = asyncio.create_task(serve(lambda: service, home.address, TOKEN, "counter", 1))
        await peer.ready(5)
        await body(home, peer, service, task)
        if not peer.ended.done():
            await peer.send(Bye())
        await asyncio.wait_for(task, 5)

    with_home(main)


def test_a_service_answers_and_closes() -> None:
    async def body(home: Home, peer: Peer, service: Counter, task: "asyncio.Task[None]") -> None:
        assert peer.methods == ("add", "large", "wait")
        assert await peer.call("add", 2, returns=int) == 2
        assert await peer.call("add", 3, returns=int) == 5
        with pytest.raises(RequestTooLarge, match="too large"):
            await peer.call("large")
        await peer.send(Bye())
        await asyncio.wait_for(task, 5)
        assert service.closed
        with pytest.raises(RoleLost, match="goodbye"):
            await peer.call("add", 1)

    serving(body)


def test_the_socket_is_private_and_removed() -> None:
    async def body(home: Home) -> None:
        path = Path(home.address.removeprefix("ipc://"))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert len(str(path)) < 100
        await home.close()
        assert not path.parent.exists()
        await home.close()

    with_home(body)


def test_the_folder_of_a_killed_home_is_removed_and_that_of_a_live_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    base = Path(tempfile.mkdtemp())
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    program = (
        "import asyncio, os\nfrom lehr.wire.home import Home\n"
        "async def main():\n    Home()\n    os._exit(9)\nasyncio.run(main())"
    )
    subprocess.run([sys.executable, "-c", program], env={**os.environ, "TMPDIR": str(base)}, check=False)
    assert len(list(base.iterdir())) == 1, "the killed one leaves its folder"

    async def main() -> None:
        first = Home()
        second = Home()
        left = {str(p) for p in base.iterdir()}
        assert left == {home.address.removeprefix("ipc://").removesuffix("/home") for home in (first, second)}
        await first.close()
        await second.close()

    asyncio.run(main())
    base.rmdir()


@pytest.mark.parametrize(
    ("token", "incarnation", "name"), [("wrong", 1, "raw"), ("", 1, "raw"), (TOKEN, 2, "raw"), (TOKEN, 1, "x")]
)
def test_who_cannot_show_the_token_is_not_let_in(token: str, incarnation: int, name: str) -> None:
    async def body(home: Home) -> None:
        peer = home.expect("raw", 1, TOKEN)
        role = RawRole(home.address)
        try:
            await role.send(Ready(("add",)))
            await role.send(Hello(name, incarnation, token, 1))
            await role.send(Ready(("add",)))
            with pytest.raises(DeadlineExceeded):
                await peer.ready(0.3)
            await role.send(Hello("raw", 1, TOKEN, 1))
            await role.send(Ready(("add",)))
            await peer.ready(5)
        finally:
            role.close()

    with_home(body)


def test_a_second_hello_under_the_same_name_is_not_let_in() -> None:
    async def body(home: Home) -> None:
        peer = home.expect("raw", 1, TOKEN)
        first, second = RawRole(home.address), RawRole(home.address)
        try:
            await first.send(Hello("raw", 1, TOKEN, 1))
            await first.send(Ready(("add",)))
            await peer.ready(5)
            await second.send(Hello("raw", 1, TOKEN, 2))
            call = asyncio.create_task(peer.call("add", returns=str))
            request, _ = await first.receive(Request)
            await second.send(Reply(request.id), encode("from the second"))
            await asyncio.sleep(0.1)
            await first.send(Reply(request.id), encode("from the first"))
            assert await call == "from the first"
        finally:
            first.close()
            second.close()

    with_home(body)


def test_noise_on_the_socket_is_dropped() -> None:
    async def body(home: Home) -> None:
        peer = home.expect("raw", 1, TOKEN)
        role = RawRole(home.address)
        try:
            await role.socket.send_multipart([b"noise"])
            await role.socket.send_multipart([b"\xff\xff", b"x"])
            await role.socket.send_multipart([b"a", b"b", b"c", b"d"])
            await role.send(Hello("raw", 1, TOKEN, 1))
            await role.send(Ready(()))
            await peer.ready(5)
            await role.send(Reply("no such request"), b"")
            call = asyncio.create_task(peer.call("add", returns=int))
            request, _ = await role.receive(Request)
            await role.send(Reply(request.id), encode("text"))
            with pytest.raises(LehrError, match="cannot decode"):
                await call
        finally:
            role.close()

    with_home(body)


def test_a_cancelled_or_late_call_tells_the_role() -> None:
    async def body(home: Home) -> None:
        peer = home.expect("raw", 1, TOKEN)
        role = RawRole(home.address)
        try:
            await role.send(Hello("raw", 1, TOKEN, 1))
            await role.send(Ready(()))
            await peer.ready(5)
            call = asyncio.create_task(peer.call("add"))
            request, _ = await role.receive(Request)
            assert 59 < request.remaining_s <= 60
            call.cancel()
            assert (await role.receive(Cancel))[0].id == request.id
            with pytest.raises(asyncio.CancelledError):
                await call
            with pytest.raises(DeadlineExceeded, match=r"raw\.add did not answer within 0\.2 s"):
                await peer.call("add", timeout_s=0.2)
            late, _ = await role.receive(Cancel)
            assert late.id != request.id
            assert peer._pending == {}
        finally:
            role.close()

    with_home(body)


def test_closing_home_fails_what_waits() -> None:
    async def body(home: Home) -> None:
        peer = home.expect("raw", 1, TOKEN)
        unready = home.expect("other", 1, TOKEN)
        role = RawRole(home.address)
        try:
            await role.send(Hello("raw", 1, TOKEN, 1))
            await role.send(Ready(()))
            await peer.ready(5)
            call = asyncio.create_task(peer.call("add"))
            await role.receive(Request)
            await home.close()
            with pytest.raises(RoleLost):
                await call
            with pytest.raises(RoleLost):
                await unready.ready(1)
        finally:
            role.close()

    with_home(body)


def test_a_silent_role_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home_module, "HEARTBEAT_S", 0.05)

    async def main() -> None:
        silent: list[str] = []
        home = Home(on_silent=lambda peer: silent.append(peer.name))
        peer = home.expect("raw", 1, TOKEN, silence_limit_s=0.3)
        role = RawRole(home.address)
        try:
            await role.send(Hello("raw", 1, TOKEN, 1))
            with pytest.raises(RoleLost, match="not dialled"):
                await peer.call("add", timeout_s=5)
            await role.send(Ready(()))
            await peer.ready(5)
            with pytest.raises(RoleLost, match="silent"):
                await peer.call("add", timeout_s=5)
            assert silent == ["raw"]
        finally:
            role.close()
            await home.close()

    asyncio.run(main())


def test_a_repeated_request_gets_the_recorded_answer(tmp_path: Path) -> None:
    async def main() -> None:
        home = RawHome(tmp_path)
        service = Counter()
        task = asyncio.create_task(serve(lambda: service, home.address, TOKEN, "counter", 4))
        try:
            hello, _ = await home.receive(Hello)
            assert (hello.role, hello.incarnation, hello.token, hello.pid) == ("counter", 4, TOKEN, os.getpid())
            await home.receive(Ready)
            for _ in range(3):
                await home.send(Request("r1", "add", 4, 5.0), encode(2))
                reply, body = await home.receive(Reply)
                assert (reply.id, reply.failure, decode(body)) == ("r1", None, 2)
            assert service.n == 2
            await home.send(Request("r2", "add", 3, 5.0), encode(2))
            reply, _ = await home.receive(Reply)
            assert reply.failure is not None
            assert reply.failure.code == "bad_request"
            assert service.n == 2
            await home.send(Request("r3", "wait", 4, 50.0))
            await home.send(Request("r4", "add", 4, 50.0), encode(0))
            await home.receive(Reply)
            await home.send(Cancel("r3"))
            await asyncio.wait_for(service.cancelled.wait(), 5)
            await home.send(Request("r5", "wait", 4, 0.1))
            reply, _ = await home.receive(Reply)
            assert (reply.id, reply.failure.code) == ("r5", "deadline")
            await home.send(Bye())
            await home.receive(Bye)
            await asyncio.wait_for(task, 5)
        finally:
            home.close()

    asyncio.run(main())


def test_a_role_ends_when_home_falls_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lehr.wire.link.HEARTBEAT_S", 0.05)

    async def main() -> None:
        home = RawHome(tmp_path)
        service = Counter()
        ends: list[int] = []
        monkeypatch.setattr(os, "_exit", ends.append)
        try:
            serving = serve(lambda: service, home.address, TOKEN, "counter", 1, silence_limit_s=0.3)
            await asyncio.wait_for(serving, 5)
            assert service.closed
        finally:
            home.close()

    asyncio.run(main())


def test_answers_are_bounded_in_number_and_bytes() -> None:
    answers = Answers(count=3, limit_bytes=10)
    for n in range(5):
        answers.keep(Reply(str(n)), b"x")
    assert [answers.get(str(n)) is not None for n in range(5)] == [False, False, True, True, True]
    answers.keep(Reply("big"), b"x" * 9)
    assert len(answers) == 2
    answers.keep(Reply("too big"), b"x" * 11)
    assert answers.get("too big") is None
    assert answers.get("big") is not None


def test_methods_must_be_servable() -> None:
    class TwoArguments:
        async def go(self, a: int, b: int) -> None: ...

    class NoAnnotation:
        async def go(self, a) -> None: ...

    class Unknown:
        async def go(self, a: "Nowhere") -> None: ...  # noqa: F821

    for kind, words in ((TwoArguments, "2 arguments"), (NoAnnotation, "no annotation"), (Unknown, "Nowhere")):
        with pytest.raises(ConfigError, match=words):
            methods_of(kind())


def test_codes_become_the_classes_that_own_them() -> None:
    for kind in (ConfigError, UnknownName, OutOfSpace, RoleLost, Diverged, DeadlineExceeded, BadRequest):
        error = error_of(Failure(kind.code, "what happened"))
        assert type(error) is kind
        assert str(error) == "what happened."
    assert type(error_of(Failure.of(RequestTooLarge("x", expected="y")))) is RequestTooLarge
    unknown = error_of(Failure("KeyError", "'a'"))
    assert type(unknown) is RemoteError
    assert (unknown.code, Failure.of(unknown).code) == ("KeyError", "KeyError")


def test_silence_counts_only_time_in_which_we_ran() -> None:
    clock = VirtualClock()
    silence = Silence(10.0, stride_s=2.0, clock=clock)
    clock.advance(3600)
    assert not silence.tick(), "stopped by a terminal for an hour: the other side is not to blame"
    for _ in range(8):
        clock.advance(1)
        assert not silence.tick()
    clock.advance(1)
    assert silence.tick()
    silence.heard()
    assert not silence.tick()
