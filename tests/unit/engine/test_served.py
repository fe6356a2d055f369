"""Engines behind a server: what happens when the server does not do what it should."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lehr.core.batch import Manifest
from lehr.core.errors import ConfigError, DeadlineExceeded, RoleLost
from lehr.core.trace import Completion, Sampling, Version
from lehr.engine.base import EngineError
from lehr.engine.served.dialect import Gauges, Limits, parsed, versions_of
from lehr.engine.served.engine import ServedEngine
from lehr.engine.served.folders import Fetched
from lehr.engine.served.http import Server
from lehr.engine.served.process import Command, ServerProcess, flags
from lehr.engine.served.values import whole
from lehr.engine.sglang.launch import open_sglang
from lehr.engine.sglang.settings import SglangConfig
from lehr.engine.vllm.launch import command
from lehr.engine.vllm.metrics import gauges
from lehr.engine.vllm.settings import SpeculativeConfig, VllmConfig
from lehr.model.checkpoint import file_digest, save_model
from lehr.model.tiny import tiny_decoder

V0, V1, V2 = Version(1, 0), Version(1, 1), Version(1, 2)

SMALL_SERVER = """
import argparse, asyncio, uvicorn
from guard import TokenGuard
from starlette.applications import Starlette
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import Route


async def health(request):
    return JSONResponse({})


async def echo(request):
    return JSONResponse({"got": await request.json(), **request.query_params})


async def refuse(request):
    return JSONResponse({"error": {"message": "too long by 3", "code": 400}}, 400)


async def slow(request):
    await asyncio.sleep(2)


async def text(request):
    return PlainTextResponse("no JSON")


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    words.add_argument("--host")
    words.add_argument("--port", type=int)
    given = words.parse_args()
    posts = [Route("/echo", echo, methods=["POST"]), Route("/refuse", refuse, methods=["POST"])]
    gets = [Route("/health", health), Route("/slow", slow), Route("/text", text)]
    uvicorn.run(TokenGuard(Starlette(routes=posts + gets)), host=given.host, port=given.port, log_level="error")
"""


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


@pytest.fixture
def small(tmp_path: Path) -> Command:
    """A server whose interpreter is ours."""
    (tmp_path / "small_server.py").write_text(SMALL_SERVER)
    return Command(Path(sys.executable), "small_server", (), {"PYTHONPATH": str(tmp_path)}, "nothing")


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_server_is_reached_with_its_token_only_and_ends_when_told(small: Command, tmp_path: Path) -> None:
    async def go() -> None:
        process = ServerProcess("small", small, tmp_path / "log")
        server = Server("small", process.url, process.token)
        try:
            await process.ready(lambda: server.text("/health"), 30)
            assert await server.post("/echo", {"a": 1}, flag=True) == {"got": {"a": 1}, "flag": "true"}
            with pytest.raises(EngineError, match="400: too long by 3"):
                await server.post("/refuse")
            with pytest.raises(DeadlineExceeded, match=r"/slow took more than 0\.1 s"):
                await server.get("/slow", timeout_s=0.1)
            with pytest.raises(EngineError, match="JSON"):
                await server.get("/text")
            for token in ("", "another"):
                guest = Server("small", process.url, token)
                assert await guest.text("/health") == "{}"
                with pytest.raises(EngineError, match="refused the token"):
                    await guest.post("/echo", {})
                await guest.close()
            shown = Path(f"/proc/{process.pid}/cmdline").read_text()
            assert process.token not in shown and "127.0.0.1" in shown
        finally:
            await process.end()
            await process.end()
        assert not alive(process.pid)
        with pytest.raises(RoleLost, match="cannot be reached"):
            await server.get("/health")
        with pytest.raises(RoleLost, match="small ended with"):
            process.check()
        await server.close()

    run(go())


def test_a_server_does_not_outlive_the_process_that_started_it(small: Command, tmp_path: Path) -> None:
    program = f"""
import asyncio, os
from pathlib import Path
from lehr.engine.served.http import Server
from lehr.engine.served.process import Command, ServerProcess
async def go():
    command = Command(Path({str(small.python)!r}), "small_server", (), {dict(small.environment)!r}, "")
    process = ServerProcess("small", command, Path({str(tmp_path / "log")!r}))
    await process.ready(lambda: Server("small", process.url).text("/health"), 30)
    print(process.pid, flush=True)
    os.kill(os.getpid(), {signal.SIGKILL:d})
asyncio.run(go())
"""

    async def go() -> None:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await child.communicate()
        pid = int(output)
        for _ in range(200):
            if not alive(pid) or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the server is still there")

    run(go())


def test_a_server_that_ends_at_once_says_why(tmp_path: Path) -> None:
    async def go() -> None:
        missing = Command(Path(sys.executable), "no_such_module", (), {}, "nothing")
        process = ServerProcess("small", missing, tmp_path / "log")
        with pytest.raises(RoleLost, match=r"(?s)small ended with 1; its log .*No module named no_such_module"):
            await process.ready(lambda: Server("small", process.url).text("/health"), 30)
        await process.end()

    run(go())


class Obedient:
    """A dialect without a server. ``fails``: the calls that raise."""

    name = "obedient"

    def __init__(self) -> None:
        self.fails: set[str] = set()
        self.calls: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.seeds: list[Version] = []

    async def _done(self, name: str) -> None:
        self.calls.append(name)
        if name in self.fails:
            raise EngineError(f"{name} failed")

    def refuse(self, sampling: Sampling) -> None: ...

    async def complete(
        self, request_id: str, tokens: Sequence[int], sampling: Sampling, version: Version, timeout_s: float
    ) -> Completion:
        self.seeds.append(version)
        await self._done("complete")
        await self.go.wait()
        return whole([1], [-1.0], np.array([version.packed]), sampling, "length", 0)

    async def score(self, request_id: str, tokens: Sequence[int], temperature: float) -> Any:
        await self._done("score")
        await self.go.wait()
        return np.zeros(len(tokens) - 1, np.float32)

    async def pause(self) -> None:
        await self._done("pause")

    async def resume(self) -> None:
        await self._done("resume")

    async def load(self, folder: Path, version: Version, in_flight: Any, *, busy: bool) -> None:
        assert (folder / "model.safetensors").exists() and (folder / "config.json").exists()
        await self._done(f"load {version} {in_flight} {busy}")

    async def flush(self) -> None:
        await self._done("flush")

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._done("abort")
        self.go.set()

    async def gauges(self) -> Gauges:
        return Gauges(0, 0, 0, 0)

    async def close(self) -> None: ...


@pytest.fixture
def published(tmp_path: Path) -> Path:
    save_model(tiny_decoder(), tmp_path / "model")
    return tmp_path / "model"


def engine_on(dialect: Obedient, published: Path) -> ServedEngine:
    return ServedEngine(dialect, Limits(1000, 264), Fetched(published), V0)


def manifest(published: Path, version: Version) -> Manifest:
    file = published / "model.safetensors"
    return Manifest(version, str(file), file_digest(file), file.stat().st_size)


def test_half_loaded_weights_are_never_sampled_from(published: Path) -> None:
    async def go() -> None:
        dialect = Obedient()
        engine = engine_on(dialect, published)
        await engine.fetch(manifest(published, V1))
        dialect.fails = {"load 1.1 keep False"}
        with pytest.raises(EngineError, match="failed"):
            await engine.activate(V1)
        assert "resume" not in dialect.calls
        for call in (
            engine.generate([1], Sampling()),
            engine.score([1, 2]),
            engine.flush(),
            engine.activate(V1),
            engine.resume(),
        ):
            with pytest.raises(EngineError, match=r"broke down: weights 1\.1 were not put in force"):
                await call
        await engine.close()

    run(go())


def test_new_requests_wait_for_new_weights_and_carry_their_version(published: Path) -> None:
    async def go() -> None:
        dialect = Obedient()
        engine = engine_on(dialect, published)
        dialect.go.clear()
        old = asyncio.create_task(engine.generate([1], Sampling(), session="old"))
        scoring = asyncio.create_task(engine.score([1, 2]))
        await asyncio.sleep(0.01)
        await engine.fetch(manifest(published, V1))
        switching = asyncio.create_task(engine.activate(V1))
        await asyncio.sleep(0)
        new = asyncio.create_task(engine.generate([1], Sampling()))
        await switching
        dialect.go.set()
        assert (await old).kv_policy == "kept_across_versions" and (await new).kv_policy == "exact"
        await scoring
        assert dialect.seeds == [V0, V1]
        assert dialect.calls.count("score") == 2, "a score that ran through a change was not made again"
        assert "load 1.1 keep True" in dialect.calls
        with pytest.raises(EngineError, match="not newer"):
            await engine.fetch(manifest(published, V1))
        await engine.close()

    run(go())


def test_a_pause_outlasts_a_change_of_weights(published: Path) -> None:
    async def go() -> None:
        dialect = Obedient()
        engine = engine_on(dialect, published)
        await engine.pause()
        await engine.fetch(manifest(published, V1))
        await engine.activate(V1, "abort")
        assert dialect.calls == ["pause", "load 1.1 abort False"]
        await engine.resume()
        assert dialect.calls[-1] == "resume"
        await engine.close()

    run(go())


def test_a_flush_that_failed_is_an_error(published: Path) -> None:
    async def go() -> None:
        dialect = Obedient()
        engine = engine_on(dialect, published)
        dialect.fails = {"flush"}
        with pytest.raises(EngineError, match="flush failed"):
            await engine.flush()
        await engine.close()

    run(go())


def test_published_weights_stay_when_their_publisher_removes_them(published: Path, tmp_path: Path) -> None:
    async def go() -> None:
        fetched = Fetched(published, tmp_path / "laid out")
        source = tmp_path / "weights.safetensors"
        source.write_bytes((published / "model.safetensors").read_bytes())
        for version in (V1, V2):
            await fetched.add(Manifest(version, str(source), file_digest(source), source.stat().st_size))
        source.unlink()
        assert file_digest(fetched.folder(V1) / "model.safetensors")
        fetched.drop_before(V2)
        assert V1 not in fetched and V2 in fetched and not (tmp_path / "laid out" / "weights-1.1").exists()
        fetched.close()

    run(go())


def test_every_token_has_a_version() -> None:
    spans = [{"version": "1.0", "start": 0, "end": 2}, {"version": "1.1", "start": 2, "end": 3}]
    assert versions_of(spans, 3).tolist() == [V0.packed, V0.packed, V1.packed]
    assert versions_of([], 0).tolist() == [] and versions_of(None, 0).tolist() == []
    for wrong in (None, [], spans[:1], spans[1:], [spans[0], {"version": "1.1", "start": 1, "end": 3}]):
        with pytest.raises(EngineError, match="one version for each token"):
            versions_of(wrong, 3)
    with pytest.raises(EngineError, match="'default'"):
        parsed("default")


def test_values_that_a_server_lacks_are_no_values() -> None:
    versions = np.array([V0.packed])
    for value in (-9999.0, float("nan"), float("-inf")):
        with pytest.raises(EngineError, match="finite"):
            whole([1], [value], versions, Sampling(), "length", 0)
    with pytest.raises(EngineError, match="1 log-probabilities for 2 tokens"):
        whole([1, 2], [-1.0], versions, Sampling(), "length", 0)
    done = whole([1], [-1.0], versions, Sampling(temperature=0), "eos", 0)
    assert done.logprobs.tolist() == [0] and done.kept_mass[0] == pytest.approx(np.exp(-1))


def test_options_reach_the_server(published: Path) -> None:
    config = VllmConfig(
        python=Path("/env/bin/python"),
        length=4096,
        chunked_prefill=False,
        token_budget=512,
        kv_dtype="fp8",
        cache_gib=1.5,
        offload_gib=8,
        speculative=SpeculativeConfig(method="draft_model", tokens=3, model="/draft"),
    )
    words = " ".join(command(published, config).arguments)
    for wanted in (
        "--max-model-len 4096",
        "--no-enable-chunked-prefill",
        "--max-num-batched-tokens 512",
        "--kv-cache-dtype fp8",
        "--kv-cache-memory-bytes 1610612736",
        "--kv-offloading-size 8.0",
        "--kv-offloading-backend native",
        '--speculative-config {"method": "draft_model", "num_speculative_tokens": 3, "model": "/draft"}',
        "--dtype float32",
        "--skip-tokenizer-init",
        "--logprobs-mode processed_logprobs",
        "--middleware guard.TokenGuard",
    ):
        assert wanted in words
    plain = " ".join(command(published, VllmConfig(python=Path("/env/bin/python"))).arguments)
    for absent in ("chunked-prefill", "offloading", "speculative", "enforce-eager", "None"):
        assert absent not in plain
    assert flags({"a": None, "b": True, "c": False, "d": 0}) == ["--b", "--no-c", "--d", "0"]


def test_metrics_are_read_over_all_engines() -> None:
    text = "\n".join(
        f"{line.replace('ENGINE', engine)}"
        for engine in ("0", "1")
        for line in (
            'vllm:num_requests_running{engine="ENGINE"} 3.0',
            'vllm:num_requests_waiting{engine="ENGINE"} 1.0',
            'vllm:kv_cache_usage_perc{engine="ENGINE"} 0.5',
            'vllm:cache_config_info{engine="ENGINE",num_gpu_blocks="101"} 1.0',
            'vllm:iteration_tokens_total_count{engine="ENGINE"} 7.0',
            'vllm:spec_decode_num_draft_tokens_total{engine="ENGINE"} 4.0',
            'vllm:spec_decode_num_accepted_tokens_total{engine="ENGINE"} 2.0',
        )
    )
    assert gauges(text) == Gauges(6, 2, 100, 200, 14, 8, 4)
    with pytest.raises(EngineError, match="num_requests_running"):
        gauges("")


def test_attaching_needs_a_token(published: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEHR_SGLANG_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="LEHR_SGLANG_TOKEN"):
        run(open_sglang(published, SglangConfig(url="http://127.0.0.1:9")))  # pyright: ignore
