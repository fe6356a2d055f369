"""The backends that the engine suite runs over.

``sglang`` speaks to a stand-in for SGLang's server: real HTTP, and the native engine behind it. ``vllm`` is a
real server, and takes part where ``LEHR_VLLM_PYTHON`` names the interpreter of its environment (``make
test-vllm``).
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from lehr.cluster.base import Role
from lehr.cluster.local import LocalCluster
from lehr.core.batch import Manifest
from lehr.core.trace import Completion, Sampling, Version
from lehr.engine.base import Engine, EngineError, UnknownSession
from lehr.engine.local import LocalEngine, open_engine
from lehr.engine.native.packing import pack
from lehr.engine.native.scoring import score
from lehr.engine.native.settings import NativeConfig
from lehr.engine.remote import RemoteEngine
from lehr.engine.router import Router
from lehr.engine.served.http import Server
from lehr.engine.served.process import HOST, ServerProcess, free_port
from lehr.engine.sglang.launch import open_sglang
from lehr.engine.sglang.settings import SglangConfig
from lehr.engine.transformers.opening import open_transformers
from lehr.engine.transformers.settings import TransformersConfig
from lehr.engine.vllm.launch import command, open_vllm
from lehr.engine.vllm.settings import VllmConfig
from lehr.model.checkpoint import file_digest, read_tensors, save_model
from lehr.model.decoder import Decoder
from lehr.model.tiny import BYTES, random_decoder, tiny_config
from lehr.model.tokenizer import ByteTokenizer

VLLM = os.environ.get("LEHR_VLLM_PYTHON", "")
SMALL = NativeConfig(max_running=4, cache_tokens=2048, dtype="float32")
SLOW = TransformersConfig(max_running=4, cache_tokens=8192, dtype="float32")
SERVED = VllmConfig(
    python=Path(VLLM).absolute(), length=2048, max_running=4, cache_gib=0.25, block_tokens=32, eager=True
)
START_S = 600
"""Seconds in which a vLLM server must answer."""
TOKEN = "a token"
FIRST = Version(1, 0)


def decoder(seed: int) -> Decoder:
    """A tiny model that, greedy, never ends: no special token is the likeliest."""
    made = random_decoder(tiny_config(hidden_size=128), seed=seed, std=0.2)
    made.embed.weight.data[BYTES:] = 0
    return made


@dataclass(frozen=True)
class Backend:
    """How to open one, and in what it differs.

    filters: top-k and top-p. temperatures: scoring at any temperature. stops: stop strings. flushes_busy:
    whether a flush succeeds while requests run. caches: whether prompts find what others computed.
    """

    kind: str
    run: Callable[[Coroutine[Any, Any, None]], None]
    open: Callable[[], Any]
    publish: Callable[[int, Version], Manifest]
    filters: bool = True
    temperatures: bool = True
    stops: bool = True
    flushes_busy: bool = True
    caches: bool = True

    def check(self, what: Callable[[Engine], Awaitable[None]]) -> None:
        """Run ``what`` on an engine that has the weights of seed 1."""

        async def go() -> None:
            async with self.open() as engine:
                await what(engine)

        self.run(go())

    def reference(self, seed: int, tokens: list[int], temperature: float = 1.0) -> np.ndarray:
        """The log-probability of every token after the first, by one forward."""
        return score(pack(decoder(seed)), tokens, temperature)


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[..., Any]]:
    """Run coroutines in one loop, so that what takes long to start serves all tests."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def within(work: Coroutine[Any, Any, Any], limit_s: float = 240) -> Any:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, limit_s), loop).result()

    yield within
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(scope="session")
def publish(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, Version], Manifest]:
    folder = tmp_path_factory.mktemp("published")

    def write(seed: int, version: Version) -> Manifest:
        path = folder / f"seed-{seed}"
        if not path.exists():
            save_model(decoder(seed), path)
        file = path / "model.safetensors"
        return Manifest(version, str(file), file_digest(file), file.stat().st_size)

    return write


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_model(decoder(1), path, ByteTokenizer())
    return path


@pytest.fixture(scope="session")
def vllm_server(folder: Path, tmp_path_factory: pytest.TempPathFactory, run: Any) -> Iterator[ServerProcess]:
    """One server for all tests: it takes a minute to start, several on a busy machine."""
    process = ServerProcess("vLLM", command(folder, SERVED), tmp_path_factory.mktemp("vllm") / "log")

    async def ready() -> None:
        server = Server("vLLM", process.url, process.token)
        await process.ready(lambda: server.text("/health", timeout_s=5), START_S)
        await server.close()

    try:
        run(ready(), START_S + 10)
        yield process
    finally:
        run(process.end())


@pytest.fixture(scope="session")
def remote_engine(folder: Path, tmp_path_factory: pytest.TempPathFactory, run: Any) -> Iterator[Engine]:
    """One process for all tests: it takes seconds to start."""

    async def start() -> tuple[LocalCluster, Engine]:
        cluster = LocalCluster(tmp_path_factory.mktemp("remote"))
        config = {"model": str(folder), "native": SMALL.model_dump(), "incarnation": 1, "threads": 1}
        return cluster, RemoteEngine(await cluster.start(Role("engine", "lehr.engine.role:build", config)))

    cluster, engine = run(start())
    yield engine
    run(cluster.close())


VLLM_KIND = pytest.param("vllm", marks=pytest.mark.timeout(START_S + 240))
"""Whichever test comes first waits for the server to start."""
KINDS = ["local", "router", "remote", "transformers", "sglang", *([VLLM_KIND] if VLLM else [])]


@pytest.fixture(params=KINDS)
def backend(
    request: pytest.FixtureRequest,
    folder: Path,
    publish: Callable[[int, Version], Manifest],
    run: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Backend:
    kind = request.param

    @asynccontextmanager
    async def native() -> AsyncGenerator[Engine]:
        members = [open_engine(folder, SMALL, FIRST) for _ in range(2 if kind == "router" else 1)]
        engine = Router(members) if kind == "router" else members[0]
        try:
            yield engine
        finally:
            await engine.close()

    @asynccontextmanager
    async def plain() -> AsyncGenerator[Engine]:
        engine = open_transformers(folder, SLOW, FIRST)
        try:
            yield engine
        finally:
            await engine.close()

    @asynccontextmanager
    async def remote() -> AsyncGenerator[Engine]:
        engine = request.getfixturevalue("remote_engine")
        await renewed(engine)
        try:
            yield engine
        finally:
            await engine.resume()
            await engine.abort()

    @asynccontextmanager
    async def sglang() -> AsyncGenerator[Engine]:
        monkeypatch.setenv("LEHR_SGLANG_TOKEN", TOKEN)
        async with standing_in(folder) as url:
            engine = await open_sglang(folder, SglangConfig(url=url), FIRST)
            try:
                yield engine
            finally:
                await engine.close()

    @asynccontextmanager
    async def vllm() -> AsyncGenerator[Engine]:
        process = request.getfixturevalue("vllm_server")
        monkeypatch.setenv("LEHR_VLLM_TOKEN", process.token)
        engine = await open_vllm(folder, SERVED.model_copy(update={"url": process.url}), FIRST)
        try:
            await renewed(engine)
            yield engine
        finally:
            await engine.close()

    async def renewed(engine: Engine) -> None:
        """Undo what another test left."""
        await engine.resume()
        has = (await engine.stats()).version
        if has > FIRST:
            await engine.fetch(publish(1, Version(has.incarnation, has.n + 1)))
            await engine.activate(Version(has.incarnation, has.n + 1), "abort")
        await engine.flush()

    if kind == "remote":
        request.getfixturevalue("remote_engine")
    if kind == "vllm":
        request.getfixturevalue("vllm_server")
        return Backend(kind, run, vllm, publish, False, False, False, False)
    if kind == "sglang":
        return Backend(kind, run, sglang, publish, False, False, True, False)
    if kind == "transformers":
        return Backend(kind, run, plain, publish, caches=False)
    return Backend(kind, run, remote if kind == "remote" else native, publish)


@asynccontextmanager
async def standing_in(folder: Path) -> AsyncGenerator[str]:
    """Serve what an SGLang server would, in a thread of its own; yield its address."""
    port = free_port()
    stand_in = StandIn(open_engine(folder, SMALL), folder)
    server = uvicorn.Server(uvicorn.Config(stand_in.app(), HOST, port, log_level="error"))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()), daemon=True)
    thread.start()
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://{HOST}:{port}"
    finally:
        server.should_exit = True
        await asyncio.to_thread(thread.join, 20)
        await stand_in.engine.close()


class StandIn:
    """SGLang's routes over a native engine.

    It keeps the books of a prefix cache that, like SGLang's, weight updates empty only when asked to, and that
    ``extra_key`` divides; an engine that forgets either gets ``cached_tokens`` that give it away.
    """

    def __init__(self, engine: LocalEngine, folder: Path) -> None:
        self.engine, self._folder = engine, folder
        self._label, self._n = "default", 0
        self._labels = {0: "default"}
        self._seen: set[tuple[Any, ...]] = set()
        self._running = 0

    def app(self) -> Starlette:
        routes: dict[str, Callable[[Any], Awaitable[Response]]] = {
            "/generate": self._generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._rename,
            "/flush_cache": self._flush,
            "/abort_request": self._abort,
        }
        reads: dict[str, Callable[[], Any]] = {
            "/server_info": lambda: {"context_length": 2048, "enable_deterministic_inference": True},
            "/model_info": lambda: {"weight_version": self._label},
        }

        def reading(value: Callable[[], Any]) -> Callable[[Request], Awaitable[Response]]:
            async def answer(_: Request) -> Response:
                return JSONResponse(value())

            return answer

        def guarded(route: Callable[[Any], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
            async def answer(request: Request) -> Response:
                if request.headers.get("authorization") != f"Bearer {TOKEN}":
                    return JSONResponse({"error": "Unauthorized"}, 401)
                body = await request.json() if request.method == "POST" and await request.body() else {}
                try:
                    return await route(body)
                except EngineError as error:
                    return JSONResponse({"error": {"message": str(error)}}, 400)

            return answer

        async def loads(_: Request) -> Response:
            stats = await self.engine.stats()
            load = {
                "num_running_reqs": stats.running,
                "num_waiting_reqs": stats.waiting,
                "num_used_tokens": stats.blocks_held * 8,
                "max_total_num_tokens": stats.blocks_total * 8,
            }
            return JSONResponse({"loads": [load]})

        return Starlette(
            routes=[
                *(Route(path, guarded(route), methods=["POST"]) for path, route in routes.items()),
                *(Route(path, reading(value)) for path, value in reads.items()),
                Route("/v1/loads", loads),
            ]
        )

    async def _generate(self, body: dict[str, Any]) -> Response:
        wanted, prompt = body["sampling_params"], body["input_ids"]
        sampling = Sampling(
            temperature=wanted["temperature"],
            max_tokens=wanted["max_new_tokens"],
            stop=tuple(wanted.get("stop", ())),
            seed=wanted.get("sampling_seed"),
        )
        key = (body.get("extra_key"), *prompt)
        cached = len(prompt) - 1 if key in self._seen else 0
        self._seen.add(key)
        self._running += 1
        try:
            done = await self.engine.generate(prompt, sampling, session=body["rid"], timeout_s=200)
        finally:
            self._running -= 1
        self._seen.add(key)
        about: dict[str, Any] = {
            "finish_reason": self._finish(done),
            "cached_tokens": cached,
            "weight_versions": self._spans(done),
            "output_token_logprobs": [
                [value, token, None]
                for value, token in zip(done.raw_logprobs.tolist(), done.tokens.tolist(), strict=True)
            ],
        }
        if body["logprob_start_len"] == 0:
            values = await self.engine.score(prompt)
            about["input_token_logprobs"] = [
                [value, token, None] for value, token in zip([None, *values.tolist()], prompt, strict=True)
            ]
        return JSONResponse({"output_ids": done.tokens.tolist(), "meta_info": about})

    def _finish(self, done: Completion) -> dict[str, Any]:
        match done.stop:
            case "length":
                return {"type": "length", "length": len(done.tokens)}
            case "abort":
                return {"type": "abort", "message": "Aborted"}
            case "stop":
                return {"type": "stop", "matched": "a string"}
            case _:
                return {"type": "stop", "matched": int(done.tokens[-1])}

    def _spans(self, done: Completion) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for at, packed in enumerate(done.versions.tolist()):
            label = self._labels[Version.unpack(packed).n]
            if not spans or spans[-1]["version"] != label:
                spans.append({"version": label, "start": at, "end": at})
            spans[-1]["end"] = at + 1
        return spans

    async def _pause(self, body: dict[str, Any]) -> Response:
        self._mode = body["mode"]
        await self.engine.pause()
        if self._mode == "abort":
            await self.engine.abort()
        return JSONResponse({"status": "ok"})

    async def _continue(self, _: dict[str, Any]) -> Response:
        await self.engine.resume()
        return JSONResponse({"status": "ok"})

    async def _update(self, body: dict[str, Any]) -> Response:
        file = Path(body["model_path"]) / "model.safetensors"
        read_tensors(file)
        self._n += 1
        version = Version(0, self._n)
        await self.engine.fetch(Manifest(version, str(file), file_digest(file), file.stat().st_size))
        await self.engine.activate(version, "recompute" if self._mode == "retract" else "keep")
        self._label = self._labels[self._n] = body["weight_version"]
        if body["flush_cache"]:
            self._seen.clear()
        return JSONResponse({"success": True, "message": "Succeeded to update model weights."})

    async def _rename(self, body: dict[str, Any]) -> Response:
        self._label = self._labels[self._n] = body["new_version"]
        return JSONResponse({"success": True})

    async def _flush(self, _: dict[str, Any]) -> Response:
        if self._running and getattr(self, "_mode", "") != "retract":
            return PlainTextResponse("Flush cache failed.", 400)
        self._seen.clear()
        return PlainTextResponse("Cache flushed.")

    async def _abort(self, body: dict[str, Any]) -> Response:
        with suppress(UnknownSession):  # SGLang says nothing of requests that it does not know
            await self.engine.abort(body["rid"])
        return Response()
