"""What every engine keeps: the native one in this process, two of them behind a router, and one in a process of
its own.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lehr.cluster.base import Role
from lehr.cluster.local import LocalCluster
from lehr.core.batch import Manifest
from lehr.core.errors import ConfigError, DeadlineExceeded, UnknownName
from lehr.core.trace import Constraint, Sampling, Version
from lehr.engine import local
from lehr.engine.base import BadConstraint, Engine, EngineError, RequestTooLarge
from lehr.engine.local import LocalEngine, open_engine
from lehr.engine.messages import Allotment
from lehr.engine.native.engine import NativeEngine
from lehr.engine.native.settings import NativeConfig
from lehr.engine.remote import RemoteEngine
from lehr.engine.router import Router
from lehr.model.checkpoint import file_digest, save_model
from lehr.model.tiny import random_decoder
from lehr.model.tokenizer import ByteTokenizer

SMALL = NativeConfig(max_running=4, cache_tokens=1024, dtype="float32")
PROMPT = [*b"What is the capital of France?"]
ENDLESS = Sampling(temperature=0.0, max_tokens=900)
"""The small model, greedy, never comes to an end of sequence."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_model(random_decoder(seed=1, std=0.2), path, ByteTokenizer())
    return path


@asynccontextmanager
async def opened(kind: str, folder: Path, logs: Path) -> AsyncGenerator[Engine]:
    if kind in ("local", "router"):
        members = [open_engine(folder, SMALL, Version(1, 0)) for _ in range(2 if kind == "router" else 1)]
        engine = Router(members) if kind == "router" else members[0]
        try:
            yield engine
        finally:
            await engine.close()
        return
    cluster = LocalCluster(logs)
    try:
        config = {"model": str(folder), "native": SMALL.model_dump(), "incarnation": 1, "threads": 1}
        handle = await cluster.start(Role("engine", "lehr.engine.role:build", config))
        yield RemoteEngine(handle)
    finally:
        await cluster.close()


def published(tmp_path: Path, seed: int, version: Version) -> Manifest:
    path = tmp_path / f"weights-{seed}"
    save_model(random_decoder(seed=seed, std=0.2), path)
    file = path / "model.safetensors"
    return Manifest(version, str(file), file_digest(file), file.stat().st_size)


def check(kind: str, folder: Path, tmp_path: Path, what: Callable[[Engine], Awaitable[None]]) -> None:
    async def go() -> None:
        async with opened(kind, folder, tmp_path) as engine:
            await what(engine)

    asyncio.run(asyncio.wait_for(go(), 240))


kinds = pytest.mark.parametrize("kind", ["local", "router", "remote"])


@kinds
@pytest.mark.timeout(300)
def test_a_completion_is_complete(kind: str, folder: Path, tmp_path: Path) -> None:
    async def what(engine: Engine) -> None:
        sampling = Sampling(temperature=0.8, max_tokens=12, seed=4)
        done = await asyncio.gather(*(engine.generate(PROMPT, sampling) for _ in range(6)))
        first = done[0]
        assert first.stop in ("length", "eos") and 0 < len(first.tokens) <= 12
        for other in done:
            assert np.array_equal(other.tokens, first.tokens)
            assert len(other.logprobs) == len(other.raw_logprobs) == len(other.kept_mass) == len(other.tokens)
        assert set(first.versions.tolist()) == {Version(1, 0).packed}
        said = await engine.score([*PROMPT, *first.tokens.tolist()], temperature=0.8)
        assert np.abs(said[len(PROMPT) - 1 :] - first.raw_logprobs).max() < 1e-4
        stats = await engine.stats()
        assert stats.blocks_free + stats.blocks_cached + stats.blocks_held == stats.blocks_total
        assert stats.running == stats.waiting == stats.blocks_held == 0

    check(kind, folder, tmp_path, what)


@kinds
@pytest.mark.timeout(300)
def test_weights_change_while_requests_run(kind: str, folder: Path, tmp_path: Path) -> None:
    async def what(engine: Engine) -> None:
        manifest = published(tmp_path, 2, Version(1, 1))
        greedy = Sampling(temperature=0, max_tokens=8)
        running = asyncio.create_task(engine.generate(PROMPT, Sampling(max_tokens=200, seed=1)))
        await asyncio.sleep(0.05)
        before = await engine.generate(PROMPT, greedy)
        await engine.fetch(manifest)
        await engine.activate(Version(1, 1))
        after = await engine.generate(PROMPT, greedy)
        assert after.cached_tokens == 0
        assert set(after.versions.tolist()) == {Version(1, 1).packed}
        assert not np.allclose(before.raw_logprobs[:1], after.raw_logprobs[:1], atol=1e-3)
        said = await engine.score([*PROMPT, *after.tokens.tolist()])
        assert np.abs(said[len(PROMPT) - 1 :] - after.raw_logprobs).max() < 1e-4
        assert (await engine.stats()).version == Version(1, 1)
        assert list((await running).versions) == sorted((await running).versions)
        with pytest.raises(EngineError):
            await engine.activate(Version(1, 0))

    check(kind, folder, tmp_path, what)


@kinds
@pytest.mark.timeout(300)
def test_damaged_weights_are_refused(kind: str, folder: Path, tmp_path: Path) -> None:
    async def what(engine: Engine) -> None:
        good = published(tmp_path, 3, Version(1, 1))
        bad = Manifest(good.version, good.path, "0" * 32, good.nbytes)
        with pytest.raises(EngineError, match="digest"):
            await engine.fetch(bad)
        with pytest.raises(EngineError, match="were not fetched"):
            await engine.activate(Version(1, 1))
        assert len((await engine.generate(PROMPT, Sampling(max_tokens=2))).tokens) > 0

    check(kind, folder, tmp_path, what)


@kinds
@pytest.mark.timeout(300)
def test_e11_too_large_fails_alone_and_cancelling_frees(kind: str, folder: Path, tmp_path: Path) -> None:
    async def what(engine: Engine) -> None:
        with pytest.raises(RequestTooLarge, match="at most 1024 together"):
            await engine.generate([1] * 1000, Sampling(max_tokens=25))
        with pytest.raises(DeadlineExceeded):
            await engine.generate(PROMPT, ENDLESS, timeout_s=0.05)
        task = asyncio.create_task(engine.generate(PROMPT, ENDLESS))
        while (await engine.stats()).running == 0:
            assert not task.done()
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(200):
            stats = await engine.stats()
            if stats.running == 0 and stats.blocks_held == 0:
                break
            await asyncio.sleep(0.02)
        assert stats.running == 0 and stats.blocks_held == 0
        assert len((await engine.generate(PROMPT, Sampling(max_tokens=3))).tokens) > 0

    check(kind, folder, tmp_path, what)


def test_abort_and_allot_over_the_wire(folder: Path, tmp_path: Path) -> None:
    async def what(engine: Engine) -> None:
        assert isinstance(engine, RemoteEngine)
        await engine.allot(Allotment(1, (0,)))
        task = asyncio.create_task(engine.generate(PROMPT, ENDLESS, session="s"))
        for _ in range(200):
            if (await engine.stats()).own_tokens:
                break
        assert await engine.abort("other") == 0
        assert await engine.abort("s") == 1
        done = await task
        assert done.stop == "abort" and len(done.tokens) > 0

    check("remote", folder, tmp_path, what)


@kinds
def test_a_constraint_is_held_to_and_a_bad_one_fails_alone(kind: str, folder: Path, tmp_path: Path) -> None:
    async def what(engine: Engine) -> None:
        sampling = Sampling(max_tokens=20, seed=1, constraint=Constraint("regex", "[a-c]{5}"), alternatives=2)
        other = asyncio.create_task(engine.generate(PROMPT, Sampling(temperature=0, max_tokens=9)))
        for bad in (Constraint("regex", "("), Constraint("schema", '{"type": "objekt"}')):
            with pytest.raises(BadConstraint, match="cannot be used"):
                await engine.generate(PROMPT, replace(sampling, constraint=bad))
        done = await engine.generate(PROMPT, sampling)
        assert re.fullmatch(rb"[a-c]{5}", bytes(done.tokens[:-1].tolist())) and done.stop == "eos"
        assert done.alternatives is not None and done.alternatives.tokens.shape == (6, 2)
        assert len((await other).tokens) == 9

    check(kind, folder, tmp_path, what)


@kinds
def test_e2_an_adapter_loaded_again_is_the_new_one(kind: str, folder: Path, tmp_path: Path) -> None:
    def write(seed: int) -> Path:
        base = "base_model.model.model.layers.0.mlp.down_proj"
        source = torch.Generator().manual_seed(seed)
        down, up = torch.randn(2, 160, generator=source), torch.randn(64, 2, generator=source)
        place = tmp_path / "adapter"
        place.mkdir(exist_ok=True)
        tensors = {f"{base}.lora_A.weight": down, f"{base}.lora_B.weight": up}
        save_file(tensors, place / "adapter_model.safetensors")
        (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8}))
        return place

    async def what(engine: Engine) -> None:
        async def said(adapter: str) -> list[int]:
            sampling = Sampling(temperature=0, max_tokens=8, adapter=adapter)
            return (await engine.generate(PROMPT, sampling)).tokens.tolist()

        plain = await said("")
        await engine.load_adapter("a", write(1))
        first = await said("a")
        await engine.load_adapter("a", write(2))
        second = await said("a")
        assert plain != first != second != plain and await said("") == plain
        await engine.load_adapter("a", write(1))
        assert await said("a") == first
        await engine.unload_adapter("a")
        with pytest.raises(UnknownName, match="adapter 'a'"):
            await said("a")
        with pytest.raises(ConfigError, match="no adapter in"):
            await engine.load_adapter("b", tmp_path / "nowhere")
        assert await said("") == plain

    check(kind, folder, tmp_path, what)


class Slow(NativeEngine):
    """Takes its time to compile."""

    def prepare(self, sampling: Sampling) -> None:
        time.sleep(2)


def test_a_constraint_that_takes_too_long_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "COMPILE_S", 0.3)

    async def go() -> None:
        engine = LocalEngine(Slow(random_decoder(seed=1, std=0.2), config=SMALL, tokenizer=ByteTokenizer()))
        try:
            late = asyncio.create_task(engine.generate(PROMPT, Sampling(constraint=Constraint("json"))))
            await asyncio.sleep(0.05)
            done = await engine.generate(PROMPT, Sampling(temperature=0, max_tokens=2))
            assert len(done.tokens) == 2 and not late.done()
            with pytest.raises(BadConstraint, match=r"not compiled within 0\.3 s"):
                await late
        finally:
            await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(PROMPT, Sampling(constraint=Constraint("json")))

    asyncio.run(asyncio.wait_for(go(), 60))


def test_tokens_are_told_as_they_are_sampled(folder: Path) -> None:
    async def go() -> None:
        engine = open_engine(folder, SMALL)
        told: list[list[int]] = []
        logprobs: list[float] = []
        raw: list[float] = []

        def on_tokens(
            tokens: Sequence[int], values: Sequence[float], raw_values: Sequence[float], others: object
        ) -> None:
            assert others == []
            told.append(list(tokens))
            logprobs.extend(values)
            raw.extend(raw_values)

        try:
            done = await engine.stream(PROMPT, Sampling(temperature=0, max_tokens=9), on_tokens)
            assert [t for tokens in told for t in tokens] == done.tokens.tolist()
            assert np.allclose(logprobs, done.logprobs) and len(told) > 1
            assert np.allclose(raw, done.raw_logprobs) and max(raw) < 0
            told.clear()
            running = asyncio.create_task(engine.stream(PROMPT, ENDLESS, on_tokens, session="long"))
            while len(told) < 3:
                await asyncio.sleep(0.01)
            await engine.abort("long")
            ended = await running
            assert ended.stop == "abort" and [t for tokens in told for t in tokens] == ended.tokens.tolist()
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(go(), 120))
