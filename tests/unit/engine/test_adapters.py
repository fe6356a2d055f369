"""Adapters side by side: each request is answered by the weights that it names, as if they were merged."""

from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from lehr.core.errors import ConfigError, UnknownName
from lehr.core.trace import Sampling, Version
from lehr.engine.native.engine import NativeEngine
from lehr.engine.native.packing import pack
from lehr.engine.native.request import Request
from lehr.engine.native.settings import NativeConfig
from lehr.model.decoder import Decoder

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def part_of(name: str) -> str:
    return f"{'mlp' if name in ALL[4:] else 'self_attn'}.{name}"


def write(
    folder: Path, plain: Decoder, seed: int, *, targets: tuple[str, ...] = ALL, rank: int = 3, **settings: Any
) -> dict[str, torch.Tensor]:
    """Write an adapter as PEFT does; return the weights of the model with the adapter merged into them."""
    source = torch.Generator().manual_seed(seed)
    merged = {name: tensor.clone() for name, tensor in plain.to_hf().items()}
    raw = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 6,
        "target_modules": list(targets),
        "bias": "none",
    } | settings
    scale = raw["lora_alpha"] / (rank**0.5 if raw.get("use_rslora") else rank)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(plain.config.num_layers):
        for name in targets:
            weight = merged[f"model.layers.{layer}.{part_of(name)}.weight"]
            down = torch.randn(rank, weight.shape[1], generator=source) * 0.3
            up = torch.randn(weight.shape[0], rank, generator=source) * 0.3
            base = f"base_model.model.model.layers.{layer}.{part_of(name)}"
            tensors |= {f"{base}.lora_A.weight": down, f"{base}.lora_B.weight": up}
            weight += scale * up @ down
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    return merged


def alone(bench: Any, weights: dict[str, torch.Tensor], prompt: list[int], sampling: Sampling) -> Request:
    """Return what an engine on merged weights says."""
    decoder = Decoder.from_hf(bench.decoder().config, weights)
    config = NativeConfig(dtype="float32", cache_tokens=4096, kernels=bench.engine()._kernels is not None)
    engine = NativeEngine(decoder, config=config)
    request = engine.submit(prompt, sampling)
    bench.run(engine, request)
    return request


def load(engine: NativeEngine, name: str, folder: Path) -> None:
    engine.load_adapter(name, engine.read_adapter(folder))


def same(request: Request, other: Request) -> bool:
    mine, theirs = request.completion(), other.completion()
    return request.tokens == other.tokens and np.allclose(mine.logprobs, theirs.logprobs, atol=1e-4)


def test_each_request_has_its_own_weights_in_the_same_step(bench: Any, tmp_path: Path) -> None:
    kinds: dict[str, Any] = {
        "all": {},
        "attention": {"targets": ("q_proj", "v_proj"), "rank": 2},
        "mlp": {"targets": ("up_proj", "down_proj"), "rank": 5, "use_rslora": True},
    }
    weights = {
        name: write(tmp_path / name, bench.decoder(), 10 + i, **more)
        for i, (name, more) in enumerate(kinds.items())
    }
    weights[""] = dict(bench.decoder().to_hf())
    engine = bench.engine(token_budget=128)
    for name in kinds:
        load(engine, name, tmp_path / name)
    assert engine.adapters == tuple(kinds)
    jobs = [
        (name, bench.prompt(30, seed), Sampling(0.8, max_tokens=12, seed=seed, adapter=name))
        for seed in range(2)
        for name in ("", *kinds)
    ]
    requests = [engine.submit(prompt, sampling) for _, prompt, sampling in jobs]
    bench.run(engine, *requests)
    assert engine.stats().steps < 30, "they share steps"
    for request, (name, prompt, sampling) in zip(requests, jobs, strict=True):
        assert same(
            request, alone(bench, weights[name], prompt, Sampling(0.8, max_tokens=12, seed=sampling.seed))
        ), name
    assert len({tuple(r.tokens) for r in requests}) == len(requests)
    assert bench.agrees(requests[0]), "the base is as it was"


def test_e2_an_adapter_loaded_again_is_the_new_one(bench: Any, tmp_path: Path) -> None:
    """Prompts that the old one, or the model alone, has in the cache are computed again."""
    prompt, sampling = bench.prompt(40), Sampling(0, max_tokens=12, adapter="a")
    engine = bench.engine()
    base = engine.submit(prompt, Sampling(0, max_tokens=12))
    bench.run(engine, base)
    for seed in (1, 2):
        merged = write(tmp_path / "a", bench.decoder(), seed)
        load(engine, "a", tmp_path / "a")
        first, again = engine.submit(prompt, sampling), engine.submit(prompt, sampling)
        bench.run(engine, first, again)
        expected = alone(bench, merged, prompt, Sampling(0, max_tokens=12))
        assert same(first, expected) and same(again, expected)
        assert first.cached_tokens == 0 and again.cached_tokens > 30, "its own prefix is found, no other"
    last = engine.submit(prompt, Sampling(0, max_tokens=12))
    bench.run(engine, last)
    assert last.tokens == base.tokens and last.cached_tokens > 30 and bench.agrees(last)


def test_requests_that_run_keep_the_adapter_that_they_began_with(bench: Any, tmp_path: Path) -> None:
    prompt, sampling = bench.prompt(20), Sampling(0, max_tokens=20, adapter="a")
    old = write(tmp_path / "a", bench.decoder(), 1)
    engine = bench.engine()
    load(engine, "a", tmp_path / "a")
    running = engine.submit(prompt, sampling)
    for _ in range(5):
        engine.step()
    write(tmp_path / "a", bench.decoder(), 2)
    load(engine, "a", tmp_path / "a")
    engine.step()
    engine.unload_adapter("a")
    with pytest.raises(UnknownName, match="adapter 'a'"):
        engine.submit(prompt, sampling)
    bench.run(engine, running)
    assert same(running, alone(bench, old, prompt, Sampling(0, max_tokens=20)))


def test_what_is_unloaded_is_freed(bench: Any, tmp_path: Path) -> None:
    write(tmp_path / "a", bench.decoder(), 1)
    engine = bench.engine()
    load(engine, "a", tmp_path / "a")
    adapter = weakref.ref(engine._adapters.get("a").parts[0, "qkv"].up_OR)
    request = engine.submit(bench.prompt(9), Sampling(0, max_tokens=3, adapter="a"))
    bench.run(engine, request)
    hooked = engine._decoder.layers[0].qkv
    assert hooked._forward_hooks
    engine.unload_adapter("a")
    del request
    gc.collect()
    assert adapter() is None
    bench.run(engine, engine.submit(bench.prompt(9), Sampling(0, max_tokens=1)))
    assert not hooked._forward_hooks, "an engine without adapters runs as if there had been none"
    with pytest.raises(UnknownName):
        engine.unload_adapter("a")


def test_adapters_outlive_a_preemption_drafts_and_new_weights(bench: Any, tmp_path: Path) -> None:
    merged = write(tmp_path / "a", bench.decoder(), 1)
    engine = bench.engine(cache_tokens=176, draft_tokens=4)
    load(engine, "a", tmp_path / "a")
    prompts = [bench.prompt(40, i) for i in range(4)]
    requests = [
        engine.submit(p, Sampling(0, max_tokens=30, adapter="a" if i % 2 else ""))
        for i, p in enumerate(prompts)
    ]
    bench.run(engine, *requests)
    assert engine._scheduler.preemptions > 0
    for i, request in enumerate(requests):
        weights = merged if i % 2 else dict(bench.decoder().to_hf())
        assert same(request, alone(bench, weights, prompts[i], Sampling(0, max_tokens=30)))
    other = bench.decoder(2)
    remerged = write(tmp_path / "a", other, 1)
    engine.offer(Version(0, 1), pack(other))
    engine.activate(Version(0, 1))
    request = engine.submit(prompts[1], Sampling(0, max_tokens=9, adapter="a"))
    bench.run(engine, request)
    assert same(request, alone(bench, remerged, prompts[1], Sampling(0, max_tokens=9)))


def test_an_adapter_for_some_modules_has_its_own_alpha(bench: Any, tmp_path: Path) -> None:
    plain = bench.decoder()
    write(tmp_path / "a", plain, 1, targets=("q_proj",))
    raw = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(raw | {"alpha_pattern": {"q_proj": 12}}))
    engine = bench.engine()
    load(engine, "a", tmp_path / "a")
    parts = engine._adapters.get("a").parts
    write(tmp_path / "b", plain, 1, targets=("q_proj",), lora_alpha=12)
    assert torch.equal(parts[1, "qkv"].up_OR, engine.read_adapter(tmp_path / "b")[1, "qkv"].up_OR)


def test_adapters_that_do_not_fit_are_refused_by_name(bench: Any, tmp_path: Path) -> None:
    engine = bench.engine()
    folder = tmp_path / "a"

    def refused(match: str, change: Any = None, **settings: Any) -> None:
        write(folder, bench.decoder(), 1, **settings)
        if change:
            from safetensors.torch import load_file

            tensors = load_file(folder / "adapter_model.safetensors")
            change(tensors)
            save_file(tensors, folder / "adapter_model.safetensors")
        with pytest.raises((ConfigError, UnknownName), match=match):
            engine.read_adapter(folder)

    first = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    with pytest.raises(ConfigError, match=r"adapter_config\.json is missing"):
        engine.read_adapter(tmp_path / "nowhere")
    refused("type 'IA3'", peft_type="IA3")
    refused("use_dora=true", use_dora=True)
    refused('bias="all"', bias="all")
    refused("modules_to_save", modules_to_save=["lm_head"])
    refused("q_proj of layer 0 has A", lambda t: t.update({first: torch.zeros(3, 5)}))
    refused("not finite", lambda t: t.update({first: torch.full((3, 64), float("nan"))}))
    refused("has only B", lambda t: t.pop(first))
    refused("layer 9", lambda t: t.update({first.replace(".0.", ".9."): t[first].clone()}))
    refused("'z_proj'", lambda t: t.update({first.replace("q_proj", "z_proj"): t[first].clone()}))
    refused("lm_head", lambda t: t.update({"base_model.model.lm_head.lora_A.weight": t[first].clone()}))
    write(folder, bench.decoder(), 1)
    (folder / "adapter_model.safetensors").write_bytes(b"not a file of tensors")
    with pytest.raises(ConfigError, match="cannot read"):
        engine.read_adapter(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match="can run code"):
        engine.read_adapter(folder)
    with pytest.raises(UnknownName, match="None is loaded"):
        engine.submit([1], Sampling(adapter="a"))
    assert engine.idle


def test_an_adapter_that_overflows_ends_its_own_requests_only(bench: Any, tmp_path: Path) -> None:
    engine = bench.engine(draft_tokens=4)
    write(tmp_path / "a", bench.decoder(), 1, lora_alpha=3e38)
    load(engine, "a", tmp_path / "a")
    plain = engine.submit(bench.prompt(30), Sampling(max_tokens=12, seed=1))
    broken = [engine.submit(bench.prompt(30), Sampling(max_tokens=12, adapter="a")) for _ in range(2)]
    bench.run(engine, plain, *broken)
    assert all("the adapter 'a' gives logits that are not finite" in str(r.error) for r in broken)
    assert plain.own == 12 and bench.agrees(plain)
    assert engine.stats().blocks_held == 0
