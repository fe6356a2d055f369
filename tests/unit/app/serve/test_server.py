"""Engines that fail, and what a client hears of it. No socket: the application is called as by a server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from lehr.app.serve import listening
from lehr.app.serve.errors import ApiError
from lehr.app.serve.metrics import Meter
from lehr.app.serve.requests import ChatBody, read
from lehr.app.serve.server import application
from lehr.app.serve.work import Limits, Served, Service
from lehr.core.errors import DeadlineExceeded
from lehr.core.trace import Completion, Sampling, Version
from lehr.engine.base import EngineError, EngineStats, OnTokens, RequestTooLarge
from lehr.model.chat import ChatRenderer
from lehr.model.tokenizer import ByteTokenizer

Act = Callable[[OnTokens | None], Coroutine[Any, Any, None]]


class FakeEngine:
    """Says "ok", after or instead of which it does what it was made with."""

    def __init__(self, act: Act, broken: bool = False) -> None:
        self._act, self._broken = act, broken
        self.cancelled = 0

    async def stream(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        on_tokens: OnTokens | None,
        *,
        session: str = "",
        timeout_s: float = 600.0,
    ) -> Completion:
        try:
            await self._act(on_tokens)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        none = np.zeros(2, np.float32)
        return Completion(np.array([111, 107], np.int32), none, none, none, none.astype(np.int64), "eos")

    async def stats(self) -> EngineStats:
        if self._broken:
            raise EngineError("the engine broke down")
        return EngineStats(Version(0, 0), 1, 2, 0, 0, 0, 0, 3, 4, 5, 0.0, 0)


def service_on(engine: FakeEngine, **limits: Any) -> Service:
    tokenizer = ByteTokenizer()
    renderer = ChatRenderer(tokenizer)
    model = Served("m", tokenizer, renderer, frozenset(renderer.stop_ids), 256, 259)
    return Service(engine, model, Limits(**limits), Meter())


async def ask(
    service: Service,
    path: str = "/v1/completions",
    body: dict[str, Any] | None = None,
    *,
    leave: asyncio.Event | None = None,
    send: Callable[[dict[str, Any]], Coroutine[Any, Any, None]] | None = None,
) -> tuple[int, dict[str, str], str]:
    """Return the status, headers and text of one answer. ``leave`` is when the client goes."""
    data = json.dumps(body).encode() if body is not None else b""
    messages = [{"type": "http.request", "body": data, "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await (leave or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def take(message: Any) -> None:
        sent.append(message)
        if send is not None:
            await send(message)

    scope = {
        "type": "http", "method": "POST" if body is not None else "GET", "path": path, "query_string": b"",
        "headers": [(b"authorization", b"Bearer t")], "http_version": "1.1", "scheme": "http",
        "server": ("x", 1), "root_path": "",
    }  # fmt: skip
    await application(service, "t")(scope, receive, take)
    if not sent:
        return 0, {}, ""
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(m["body"] for m in sent[1:]).decode()


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))


def raising(error: Exception, first: bool = False) -> Act:
    async def act(on_tokens: OnTokens | None) -> None:
        if first and on_tokens is not None:
            on_tokens([111], [0.0], [0.0], [])
            await asyncio.sleep(0.05)
        raise error

    return act


async def forever(on_tokens: OnTokens | None) -> None:
    if on_tokens is not None:
        on_tokens([111], [0.0], [0.0], [])
    await asyncio.Event().wait()


FAILURES = [
    (EngineError("it broke"), 500, "engine_error", "server_error"),
    (RequestTooLarge("too large"), 400, "context_length_exceeded", "invalid_request_error"),
    (DeadlineExceeded("late"), 504, "deadline_exceeded", "server_error"),
    (ZeroDivisionError("secret"), 500, "internal_error", "server_error"),
]


@pytest.mark.parametrize(("error", "status", "code", "kind"), FAILURES)
@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_before_the_first_token_has_its_status(
    error: Exception, status: int, code: str, kind: str, stream: bool
) -> None:
    service = service_on(FakeEngine(raising(error)))
    found, headers, text = run(ask(service, body={"model": "m", "prompt": "x", "n": 2, "stream": stream}))
    said = json.loads(text)["error"]
    assert (found, said["code"], said["type"]) == (status, code, kind) and "secret" not in text
    assert ("x-should-retry" in headers) == (status >= 500 and code != "internal_error")
    assert service.live == 0 and service.requests == 0


@pytest.mark.parametrize(("error", "status", "code", "kind"), FAILURES)
def test_a_failure_in_a_stream_is_its_last_event(error: Exception, status: int, code: str, kind: str) -> None:
    service = service_on(FakeEngine(raising(error, first=True)))
    found, _, text = run(ask(service, body={"model": "m", "prompt": "x", "stream": True}))
    events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    assert found == 200 and events[0]["choices"][0]["text"] == "o"
    assert events[-1]["error"]["code"] == code and "[DONE]" not in text


@pytest.mark.parametrize("stream", [True, False])
def test_one_choice_that_fails_ends_the_others(stream: bool) -> None:
    calls = 0

    async def act(on_tokens: OnTokens | None) -> None:
        nonlocal calls
        calls += 1
        await (raising(EngineError("it broke"))(on_tokens) if calls == 3 else asyncio.Event().wait())

    engine = FakeEngine(act)
    body = {"model": "m", "prompt": "x", "n": 3, "stream": stream}
    assert run(ask(service_on(engine), body=body))[0] == 500
    assert engine.cancelled == 2


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_completions(stream: bool) -> None:
    async def go() -> None:
        engine = FakeEngine(forever)
        service, leave = service_on(engine), asyncio.Event()
        body = {"model": "m", "prompt": "x", "n": 2, "stream": stream}
        asking = asyncio.create_task(ask(service, body=body, leave=leave))
        while service.live < 2:
            await asyncio.sleep(0.01)
        leave.set()
        await asking
        assert engine.cancelled == 2 and service.live == 0
        assert 'status="499"} 1' in service.meter.exposition(None)

    run(go())


def test_a_client_that_reads_nothing_meets_the_deadline() -> None:
    async def stuck(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def go() -> None:
        engine = FakeEngine(forever)
        service = service_on(engine, timeout_s=0.2)
        with pytest.raises(TimeoutError):
            await ask(service, body={"model": "m", "prompt": "x", "stream": True}, send=stuck)
        assert engine.cancelled == 1 and service.live == 0

    run(go())


def test_a_body_that_never_ends_meets_the_deadline() -> None:
    async def go() -> None:
        service = service_on(FakeEngine(forever), timeout_s=0.1)
        sent: list[Any] = []

        async def receive() -> Any:
            await asyncio.sleep(0.02)
            return {"type": "http.request", "body": b" ", "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"",
            "headers": [(b"authorization", b"Bearer t")], "root_path": "", "server": ("x", 1), "scheme": "http",
        }  # fmt: skip
        await application(service, "t")(scope, receive, send)
        assert sent[0]["status"] == 504

    run(go())


def test_a_broken_engine_is_unhealthy_and_metrics_live_on() -> None:
    service = service_on(FakeEngine(forever, broken=True))
    status, _, text = run(ask(service, "/health"))
    assert status == 503 and json.loads(text)["status"] == "broken"
    status, headers, text = run(ask(service, "/metrics"))
    assert status == 200 and "lehr_serve_engine_up 0" in text and "lehr_serve_running" not in text
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    text = run(ask(service_on(FakeEngine(forever)), "/metrics"))[2]
    assert "lehr_serve_running 1\n" in text and "lehr_serve_waiting 2\n" in text
    assert "lehr_serve_cached_tokens_total 4\n" in text and "lehr_serve_output_tokens_total 5\n" in text


def test_a_server_that_stops_takes_nothing_new() -> None:
    service = service_on(FakeEngine(forever))
    service.stopping = True
    status, headers, text = run(ask(service, body={"model": "m", "prompt": "x"}))
    assert status == 503 and "retry-after" in headers and json.loads(text)["error"]["code"] == "shutting_down"
    assert run(ask(service, "/health"))[0] == 503


def test_latencies_are_counted() -> None:
    async def act(on_tokens: OnTokens | None) -> None:
        assert on_tokens is not None
        on_tokens([111], [0.0], [0.0], [])
        await asyncio.sleep(0.03)
        on_tokens([107], [0.0], [0.0], [])

    service = service_on(FakeEngine(act))
    status, _, text = run(ask(service, body={"model": "m", "prompt": "x"}))
    assert status == 200 and json.loads(text)["choices"][0]["text"] == "ok"
    shown = service.meter.exposition(None)
    assert "lehr_serve_time_to_first_token_seconds_count 1\n" in shown
    assert 'lehr_serve_time_per_output_token_seconds_bucket{le="0.025"} 0\n' in shown
    assert 'lehr_serve_time_per_output_token_seconds_bucket{le="+Inf"} 1\n' in shown


def test_only_the_server_loads_the_server() -> None:
    source = (
        "import sys, lehr.app.cli, lehr.app.commands.serve\n"
        "print([m for m in ('starlette', 'uvicorn', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_connections_whose_headers_do_not_end_are_closed_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listening, "HEADERS_S", 0.3)

    async def says_later(on_tokens: OnTokens | None) -> None:
        await asyncio.sleep(0.8)

    async def trickle(host: str, port: int, first: bytes) -> float:
        """Send a byte now and then; return after how many seconds the server hung up."""
        reader, writer = await asyncio.open_connection(host, port)
        began = asyncio.get_running_loop().time()
        writer.write(first)
        hung_up = asyncio.create_task(reader.read())
        while not hung_up.done():
            writer.write(b"x")
            await asyncio.sleep(0.05)
        writer.close()
        return asyncio.get_running_loop().time() - began

    async def what() -> None:
        service = service_on(FakeEngine(says_later))
        bound = listening.bind("127.0.0.1", 0)
        host, port = bound.getsockname()[:2]
        up = asyncio.Event()
        serving = asyncio.create_task(
            listening.listen(
                application(service, "t"), service, bound, drain_s=0, ready=up.set, say=lambda _: None
            )
        )
        await up.wait()
        body = b'{"model": "m", "prompt": "a"}'
        head = (
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer t\r\ncontent-length: %d\r\n\r\n"
        )
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(head % len(body) + body)
        slow, silent = await asyncio.gather(
            trickle(host, port, b"GET /health HTTP/1.1\r\nx-a: "), trickle(host, port, b"")
        )
        assert 0.25 < slow < 3 and 0.25 < silent < 3
        assert b" 200 " in await reader.readline()
        writer.close()
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        bound.close()

    run(what())


@pytest.mark.parametrize("field", ["messages", "tools"])
def test_a_body_is_read_up_to_its_first_wrong_element(field: str) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}]} | {field: [{}] * 1000}
    with pytest.raises(ApiError, match=f"^{field}.0.") as caught:
        read(ChatBody, json.dumps(body).encode())
    assert "more fields" not in str(caught.value)
