"""Constrained output and adapters, in every kind of the native engine; the others refuse them by name."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lehr.core.errors import ConfigError, UnknownName
from lehr.core.trace import Constraint, Sampling
from lehr.engine import local
from lehr.engine.base import BadConstraint, Engine, EngineError
from lehr.engine.local import LocalEngine
from lehr.engine.native.engine import NativeEngine
from lehr.engine.native.settings import NativeConfig
from lehr.model.tiny import random_decoder
from lehr.model.tokenizer import ByteTokenizer

PROMPT = [*b"What is the capital of France?"]
SMALL = NativeConfig(max_running=4, cache_tokens=1024, dtype="float32")
NATIVE = ("local", "router", "remote")


def check(backend: Any, what: Callable[[Engine], Awaitable[None]]) -> None:
    if backend.kind in NATIVE:
        backend.check(what)
        return

    async def refused(engine: Engine) -> None:
        for sampling in (
            Sampling(constraint=Constraint("json")),
            Sampling(alternatives=2),
            Sampling(adapter="a"),
        ):
            with pytest.raises(EngineError, match=r"cannot sample with (constraint|alternatives|adapter)="):
                await engine.generate(PROMPT, sampling)
        with pytest.raises(EngineError, match="takes no adapters"):
            await engine.load_adapter("a", Path("/nowhere"))
        with pytest.raises(UnknownName):
            await engine.unload_adapter("a")

    backend.check(refused)


def test_a_constraint_is_held_to_and_a_bad_one_fails_alone(backend: Any, tmp_path: Path) -> None:
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

    check(backend, what)


def test_e2_an_adapter_loaded_again_is_the_new_one(backend: Any, tmp_path: Path) -> None:
    def write(seed: int) -> Path:
        base = "base_model.model.model.layers.0.mlp.down_proj"
        source = torch.Generator().manual_seed(seed)
        down, up = torch.randn(2, 320, generator=source), torch.randn(128, 2, generator=source)
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

    check(backend, what)


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
