"""A server that answers as it is told: with a completion, a refusal, garbage, half an answer, late or never."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Act = Callable[["FakeApi", asyncio.StreamWriter], Awaitable[None]]


@dataclass
class FakeApi:
    """acts: what the next requests get, in order; the last one goes on for ever."""

    acts: list[Act]
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    address: str = ""
    running: int = 0
    most: int = 0
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
            named = {name.lower(): value for name, value in fields.items()}
            self.headers.append(named)
            self.bodies.append(json.loads(await reader.readexactly(int(named["content-length"]))))
            self.times.append(asyncio.get_running_loop().time())
            act = self.acts.pop(0) if len(self.acts) > 1 else self.acts[0]
            self.running += 1
            self.most = max(self.most, self.running)
            acting = asyncio.ensure_future(act(self, writer))
            leaving = asyncio.ensure_future(reader.read(1))
            try:
                await asyncio.wait({acting, leaving}, return_when=asyncio.FIRST_COMPLETED)
                if not acting.done():
                    self.gone.set()
            finally:
                self.running -= 1
                for task in (acting, leaving):
                    task.cancel()
                await asyncio.gather(acting, leaving, return_exceptions=True)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def fake_api(*acts: Act) -> AsyncGenerator[FakeApi]:
    api = FakeApi(list(acts))
    server = await asyncio.start_server(api._serve, "127.0.0.1", 0)
    api.address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield api
    finally:
        server.close()


async def _send(writer: asyncio.StreamWriter, status: int, body: bytes, headers: Sequence[str] = ()) -> None:
    lines = [f"HTTP/1.1 {status} X", "content-type: application/json", f"content-length: {len(body)}", *headers]
    writer.write("\r\n".join([*lines, "connection: close", "", ""]).encode() + body)
    await writer.drain()


def completion(
    text: str = "hello", *, finish: str = "stop", usage: tuple[int, int, int] | None = (7, 2, 3)
) -> bytes:
    body: dict[str, Any] = {
        "id": "x", "object": "chat.completion", "created": 0, "model": "the-model-itself",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish}],
    }  # fmt: skip
    if usage:
        prompt, cached, said = usage
        body["usage"] = {
            "prompt_tokens": prompt, "completion_tokens": said, "total_tokens": prompt + said,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip
    return json.dumps(body).encode()


def says(text: str = "hello", *, after_s: float = 0.0, **more: Any) -> Act:
    async def act(api: FakeApi, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(after_s)
        await _send(writer, 200, completion(text, **more))

    return act


def refuses(status: int, message: str = "no", *headers: str, code: str | None = None) -> Act:
    async def act(api: FakeApi, writer: asyncio.StreamWriter) -> None:
        body = {"error": {"message": message, "type": "x", "param": None, "code": code}}
        await _send(writer, status, json.dumps(body).encode(), headers)

    return act


def sends(body: bytes, status: int = 200) -> Act:
    async def act(api: FakeApi, writer: asyncio.StreamWriter) -> None:
        await _send(writer, status, body)

    return act


async def cuts(api: FakeApi, writer: asyncio.StreamWriter) -> None:
    """Promise more than is sent."""
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 999\r\n\r\n" + completion()[:40]
    )
    await writer.drain()


async def hangs_up(api: FakeApi, writer: asyncio.StreamWriter) -> None:
    """Say nothing at all."""


async def never(api: FakeApi, writer: asyncio.StreamWriter) -> None:
    """Keep the connection and stay silent."""
    await asyncio.sleep(3600)
