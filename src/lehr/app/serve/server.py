"""The Starlette application: routes, the token, deadlines, clients that leave."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lehr.app.serve import errors
from lehr.app.serve.errors import ApiError, ClientGone
from lehr.app.serve.requests import Body, ChatBody, CompletionBody, read
from lehr.app.serve.responses import DONE, event, shape_for
from lehr.app.serve.work import Delta, Service
from lehr.core.prometheus import CONTENT_TYPE
from lehr.engine.base import EngineError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_BYTES = 8 << 20
HEARD_BYTES = 64 << 20
_LAST_WORDS_S = 1.0
_EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}
_GONE = 499

log = logging.getLogger("lehr.serve")


def application(service: Service, token: str) -> Starlette:
    """Return the application. ``GET /health`` is open, everything else asks for the token."""
    began = int(time.time())
    names = (service.model.id, *service.model.adapters)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_card(service, name, began) for name in names]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        service.require_model(name)
        return JSONResponse(_card(service, name, began))

    async def health(request: Request) -> Response:
        if service.stopping:
            return JSONResponse({"status": "stopping"}, 503)
        try:
            await service.engine.stats()
        except EngineError as error:
            return JSONResponse({"status": "broken", "detail": str(error)}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        try:
            stats = await service.engine.stats()
        except EngineError:
            stats = None
        return Response(service.meter.exposition(stats), media_type=CONTENT_TYPE)

    routes = [
        Route("/v1/chat/completions", Completions(service, ChatBody), methods=["POST"]),
        Route("/v1/completions", Completions(service, CompletionBody), methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/metrics", metrics),
    ]
    paths = frozenset(route.path for route in routes)
    return Starlette(
        routes=routes,
        middleware=[Middleware(Guard, service=service, token=token, paths=paths)],
        exception_handlers={HTTPException: _http, ApiError: _refused},
    )


class Guard:
    """Asks for the token before anything is read, and counts every answer."""

    def __init__(self, app: ASGIApp, service: Service, token: str, paths: frozenset[str]) -> None:
        self._app, self._service, self._paths = app, service, paths
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = _GONE

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            if scope["path"] != "/health" and not self._admits(Request(scope)):
                error = ApiError(
                    401, "the token is wrong or missing. Expected `Authorization: Bearer TOKEN`, with the token"
                    " that the server was started with.", code="invalid_api_key",
                    headers={"www-authenticate": "Bearer"},
                )  # fmt: skip
                await _response(error)(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        except ClientGone:
            status = _GONE
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._service.meter.answered(path, status)

    def _admits(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        known = hmac.compare_digest(given.strip().encode(errors="replace"), self._token)
        return known and scheme.lower() == "bearer"


class Completions:
    """Both endpoints that make completions. A client that leaves, in whatever phase, frees its requests."""

    def __init__(self, service: Service, kind: type[Body]) -> None:
        self._service, self._kind = service, kind

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        answer = _Answer(send)
        try:
            await self._serve(Request(scope), receive, answer)
        except (ClientGone, asyncio.CancelledError):
            raise
        except Exception as error:  # the boundary: a client gets a typed answer, whatever went wrong
            known = errors.of(error, self._service.limits.timeout_s)
            if known is None:
                log.error("a request failed unexpectedly", exc_info=error)
                known = ApiError(500, "an unexpected error; the server's log has it.", code="internal_error")
            await answer.fail(known, scope, receive)

    async def _serve(self, request: Request, receive: Receive, answer: _Answer) -> None:
        service, arrived = self._service, time.monotonic()
        limit = asyncio.get_running_loop().time() + service.limits.timeout_s
        async with asyncio.timeout_at(limit):
            body = read(self._kind, await _body(request, receive))
        service.require_model(body.model)
        prompts = len(body.prompt) if isinstance(body, CompletionBody) else 1
        with service.admitted(prompts * body.n):
            work = asyncio.create_task(self._work(body, answer, arrived))
            ends = [asyncio.create_task(_until_gone(receive)), asyncio.create_task(service.aborting.wait())]
            try:
                async with asyncio.timeout_at(limit):
                    await asyncio.wait({work, *ends}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                finished, gone = work.done(), ends[0].done()
                for task in (work, *ends):
                    task.cancel()
                await asyncio.gather(work, *ends, return_exceptions=True)
            if finished:
                work.result()
            elif gone:
                raise ClientGone
            else:
                raise errors.stopping()

    async def _work(self, body: Body, answer: _Answer, arrived: float) -> None:
        service = self._service
        jobs = await asyncio.to_thread(service.jobs, body)
        request_id = secrets.token_hex(12)
        shape = shape_for(body, body.model, request_id)
        if not body.stream:
            deltas: list[Delta] = []
            usage = await service.run(body, jobs, deltas.append, arrived, request_id)
            await answer.whole(shape.whole(deltas, usage))
            return
        queue: asyncio.Queue[bytes] = asyncio.Queue()

        async def produce() -> None:
            def tell(delta: Delta) -> None:
                queue.put_nowait(event(shape.chunk(delta)))

            usage = await service.run(body, jobs, tell, arrived, request_id)
            if body.include_usage:
                queue.put_nowait(event(shape.usage_chunk(usage)))
            queue.put_nowait(DONE)

        opening = [chunk for i in range(len(jobs)) if (chunk := shape.opening(i))]
        async with asyncio.TaskGroup() as group:
            group.create_task(produce())
            await answer.stream(b"".join(map(event, opening)), queue)


class _Answer:
    """What was sent of a response so far."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = self._ended = False

    async def whole(self, value: Mapping[str, Any]) -> None:
        response = JSONResponse(value)
        self._begun = self._ended = True
        await self._start(200, response.headers)
        await self._send({"type": "http.response.body", "body": response.body})

    async def stream(self, opening: bytes, queue: asyncio.Queue[bytes]) -> None:
        """Send events until the one that says it is done. Headers wait for the first, which may be an error."""
        data = await queue.get()
        self._begun = True
        await self._start(200, _EVENTS)
        data = opening + data
        while True:
            while not queue.empty():
                data += queue.get_nowait()
            self._ended = data.endswith(DONE)
            await self._send({"type": "http.response.body", "body": data, "more_body": not self._ended})
            if self._ended:
                return
            data = await queue.get()

    async def fail(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        if not self._begun:
            await _response(error)(scope, receive, self._send)
        elif not self._ended:
            last = {"type": "http.response.body", "body": event(error.body()), "more_body": False}
            async with asyncio.timeout(_LAST_WORDS_S):  # a client that reads nothing is not waited for
                await self._send(last)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


async def _body(request: Request, receive: Receive) -> bytes:
    """Return the body. Raises :class:`ApiError` 413; what is too large is read, so that the client hears of it,
    and not kept.
    """
    length = request.headers.get("content-length", "")
    known = int(length) if length.isdigit() else 0
    data, size, more = bytearray(), 0, known <= HEARD_BYTES
    while more and size <= HEARD_BYTES:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part = message.get("body", b"")
        size += len(part)
        if max(size, known) <= BODY_BYTES:
            data += part
        more = message.get("more_body", False)
    if max(size, known) <= BODY_BYTES:
        return bytes(data)
    text = f"the body is larger than {BODY_BYTES >> 20} MiB. Send a shorter prompt."
    raise ApiError(413, text, code="body_too_large", headers={"connection": "close"})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _card(service: Service, name: str, began: int) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": began,
        "owned_by": "lehr",
        "max_model_len": service.model.context_tokens,
    } | ({"parent": service.model.id} if name != service.model.id else {})


def _response(error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, headers=error.headers)


async def _http(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 404:
        known = ApiError(404, f"no such path: {request.url.path[:200]}. See docs/serve.md.", code="not_found")
    elif status == 405:
        message = f"{request.method} is not for {request.url.path[:200]}."
        known = ApiError(405, message, code="method_not_allowed")
    else:
        known = ApiError(status, str(error))
    known.headers |= dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return _response(known)


async def _refused(request: Request, error: Exception) -> Response:
    return _response(error if isinstance(error, ApiError) else ApiError(500, str(error)))
