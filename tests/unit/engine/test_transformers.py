"""The engine on transformers: the native one's tokens and log-probabilities, and architectures beyond it."""

from __future__ import annotations

import asyncio
import builtins
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lehr.core.batch import Manifest
from lehr.core.errors import ConfigError, MissingDependency, UnknownName
from lehr.core.trace import Sampling, Version
from lehr.engine.base import EngineError
from lehr.engine.messages import GenerateRequest
from lehr.engine.native.engine import NativeEngine
from lehr.engine.native.packing import pack
from lehr.engine.native.request import Request
from lehr.engine.native.settings import NativeConfig
from lehr.engine.role import build
from lehr.engine.transformers.core import TransformersCore
from lehr.engine.transformers.loading import load_model, require_transformers
from lehr.engine.transformers.settings import TransformersConfig
from lehr.model.checkpoint import file_digest, save_model
from lehr.model.config import ModelConfig
from lehr.model.decoder import Decoder
from lehr.model.outline import outline
from lehr.model.tiny import random_decoder, tiny_config
from lehr.model.tokenizer import ByteTokenizer
from lehr.pipeline.models import context_tokens, locate_model
from lehr.pipeline.observer import Silent

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_size": 24, "tied_head": False},
}
PROMPTS = [[*b"a"], [*b"The quick brown fox"]]
SETTINGS = [
    Sampling(temperature=0.0, max_tokens=8),
    Sampling(temperature=1.3, max_tokens=8, seed=3),
    Sampling(temperature=0.7, top_p=0.8, max_tokens=8, seed=4),
    Sampling(temperature=1.0, top_k=5, top_p=0.9, max_tokens=8, seed=5),
]


def shape(family: str) -> ModelConfig:
    return tiny_config(num_layers=2).model_copy(update={"family": family, **FAMILIES[family]})


def decoder(family: str, seed: int = 1) -> Decoder:
    made = random_decoder(shape(family), seed=seed, std=0.25)
    if family == "qwen2":  # biases of zero would not show
        tensors = made.to_hf()
        source = torch.Generator().manual_seed(seed)
        for name, tensor in tensors.items():
            if name.endswith(".bias"):
                tensors[name] = torch.randn(tensor.shape, generator=source)
        made = Decoder.from_hf(shape(family), tensors, torch.float32)
    return made


def core(folder: Path, *, stop: tuple[int, ...] = (), **settings: Any) -> TransformersCore:
    model, found = load_model(folder, torch.float32)
    return TransformersCore(
        model,
        vocab_size=found.vocab_size,
        max_positions=found.max_positions,
        config=TransformersConfig(**settings),
        tokenizer=ByteTokenizer(),
        stop_ids=stop,
    )


def run(engine: TransformersCore | NativeEngine, *requests: Request) -> None:
    for _ in range(2000):
        if engine.idle:
            break
        engine.step()
    assert all(request.finished for request in requests)


def agree(one: Request, other: Request) -> None:
    a, b = one.completion(), other.completion()
    assert a.tokens.tolist() == b.tokens.tolist() and a.stop == b.stop
    assert a.versions.tolist() == b.versions.tolist()
    for name in ("logprobs", "raw_logprobs", "kept_mass"):
        assert np.abs(getattr(a, name) - getattr(b, name)).max() < 1e-4, name


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def test_equal_seeds_give_the_native_engines_tokens(family: str, tmp_path: Path) -> None:
    save_model(decoder(family), tmp_path / "m")
    slow = core(tmp_path / "m", max_running=3)
    native = NativeEngine(
        decoder(family), config=NativeConfig(dtype="float32", kernels=False), tokenizer=ByteTokenizer()
    )
    pairs = [(slow.submit(p, s), native.submit(p, s)) for p in PROMPTS for s in SETTINGS]
    run(slow, *(a for a, _ in pairs))
    run(native, *(b for _, b in pairs))
    for one, other in pairs:
        agree(one, other)
    for prompt in PROMPTS:
        said = slow.score(prompt, 0.6)
        assert said.shape == (len(prompt) - 1,) and said.dtype == np.float32
        assert np.allclose(said, native.score(prompt, 0.6), atol=1e-4)
    long = [n * 7 % 256 for n in range(300)]
    assert np.allclose(slow.score(long), native.score(long), atol=1e-4)
    spread = {tuple(a.completion().tokens.tolist()) for a, _ in pairs}
    assert len(spread) > len(PROMPTS), "the settings make no difference"


def test_stop_strings_and_stop_tokens_end_alike(tmp_path: Path) -> None:
    save_model(decoder("llama"), tmp_path / "m")
    probe = core(tmp_path / "m")
    free = probe.submit(PROMPTS[1], Sampling(temperature=0, max_tokens=12))
    run(probe, free)
    said = free.completion().tokens.tolist()
    text = bytes(t for t in said[3:5] if t < 256).decode("latin-1")
    stop = (said[7],)
    slow = core(tmp_path / "m", stop=stop)
    native = NativeEngine(
        decoder("llama"), config=NativeConfig(dtype="float32"), tokenizer=ByteTokenizer(), stop_ids=stop
    )
    for sampling in (
        Sampling(temperature=0, max_tokens=12),
        Sampling(temperature=0, max_tokens=12, stop=(text, "zzz")),
        Sampling(temperature=0, max_tokens=0),
    ):
        one, other = slow.submit(PROMPTS[1], sampling), native.submit(PROMPTS[1], sampling)
        run(slow, one)
        run(native, other)
        assert one.stop == other.stop and one.tokens == other.tokens


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "abort"])
def test_weights_change_under_running_requests(in_flight: Any, tmp_path: Path) -> None:
    for seed in (1, 2):
        save_model(decoder("llama", seed), tmp_path / str(seed))
    slow = core(tmp_path / "1")
    native = NativeEngine(decoder("llama"), config=NativeConfig(dtype="float32"))
    sampling = Sampling(temperature=1.0, max_tokens=12, seed=8)
    one, other = slow.submit(PROMPTS[1], sampling), native.submit(PROMPTS[1], sampling)
    for _ in range(5):
        slow.step()
        native.step()
    file = tmp_path / "2" / "model.safetensors"
    version = Version(0, 1)
    slow.offer(version, slow.load(Manifest(version, str(file), file_digest(file), 0)))
    native.offer(version, pack(decoder("llama", 2)))
    slow.activate(version, in_flight)
    native.activate(version, in_flight)
    run(slow)
    run(native)
    agree(one, other)
    assert one.completion().kv_policy == other.completion().kv_policy
    late = slow.submit(PROMPTS[1], sampling)
    run(slow, late)
    assert set(late.versions) == {version.packed} and slow.stats().blocks_held == 0


def test_requests_wait_for_room(tmp_path: Path) -> None:
    save_model(decoder("llama"), tmp_path / "m")
    slow = core(tmp_path / "m", cache_tokens=64)
    requests = [slow.submit([n], Sampling(max_tokens=30, seed=n)) for n in range(3)]
    seen = set()
    while not slow.idle:
        slow.step()
        stats = slow.stats()
        seen.add(stats.running)
        assert stats.blocks_free >= 0 and stats.blocks_free + stats.blocks_held == stats.blocks_total
    assert max(seen) == 2 and all(r.own == 30 or r.stop == "eos" for r in requests)


def foreign(folder: Path) -> Any:
    """Save a model of a family that the decoder does not know; return it as transformers has it."""
    transformers = require_transformers()
    made = transformers.Gemma2Config(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, sliding_window=24,
        eos_token_id=[1, 258], bos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(3)
    peer = transformers.AutoModelForCausalLM.from_config(made).eval()
    peer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 7]}))
    ByteTokenizer().save(folder)
    return peer


def test_an_architecture_that_the_decoder_lacks(tmp_path: Path) -> None:
    peer = foreign(tmp_path / "g")
    found = outline(tmp_path / "g")
    assert (found.known, found.family, found.max_positions, found.eos_ids) == (
        False,
        "gemma2",
        512,
        (1, 7, 258),
    )
    slow = core(tmp_path / "g")
    request = slow.submit([*b"A prompt that is longer than the window"], Sampling(max_tokens=20, seed=1))
    run(slow, request)
    ids = torch.tensor([request.tokens])
    with torch.no_grad():
        said = peer(ids[:, :-1]).logits[0].double().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
    own = request.completion().raw_logprobs
    assert len(own) == 20 and np.abs(said[-20:] - own).max() < 1e-4
    assert np.abs(said - slow.score(request.tokens)).max() < 1e-4


def test_an_engine_process_falls_back_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    foreign(tmp_path / "g")

    async def go() -> None:
        service = build({"model": str(tmp_path / "g"), "native": {"dtype": "float32"}})
        try:
            done = await service.generate(GenerateRequest(np.arange(5, dtype=np.int32), Sampling(max_tokens=3)))
            assert 0 < len(done.tokens) <= 3
        finally:
            await service.close()

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(go(), 60))
    assert "does not know the family 'gemma2'" in caplog.text
    with pytest.raises(ConfigError, match="draft_tokens is 4, which the native engine alone has"):
        build({"model": str(tmp_path / "g"), "native": {"draft_tokens": 4}})


def test_a_family_that_is_not_known_can_be_sampled_from_and_not_trained(tmp_path: Path) -> None:
    foreign(tmp_path / "g")
    notes: list[str] = []

    class Notes(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    name = str(tmp_path / "g")
    assert locate_model(name, Notes(), only_sampled=True) == tmp_path / "g"
    assert len(notes) == 1 and "many times slower" in notes[0]
    assert context_tokens(tmp_path / "g") == 512
    with pytest.raises(UnknownName, match=r"(?s)gemma2.*`lehr serve` and `lehr eval`"):
        locate_model(name, Notes())


def test_a_model_without_a_cache_is_computed_again_for_each_token(tmp_path: Path) -> None:
    save_model(decoder("llama"), tmp_path / "m")
    usual, bare = core(tmp_path / "m"), core(tmp_path / "m")
    forward = bare._forward
    bare._forward = lambda tokens, cache, last_only: (  # type: ignore[method-assign]
        forward(tokens, None, last_only=last_only)[0], None,
    )  # fmt: skip
    done = []
    for engine in (usual, bare):
        request = engine.submit(PROMPTS[1], Sampling(max_tokens=6, seed=2))
        run(engine, request)
        done.append(request)
        assert len(engine.score([*range(97)])) == 96
    agree(*done)


def test_what_cannot_be_used_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(decoder("llama"), tmp_path / "m")
    slow = core(tmp_path / "m")
    with pytest.raises(EngineError, match="empty"):
        slow.submit([], Sampling())
    other = tmp_path / "other"
    save_model(random_decoder(tiny_config(num_layers=1), seed=1), other)
    file = other / "model.safetensors"
    with pytest.raises(EngineError, match="missing tensors"):
        slow.load(Manifest(Version(0, 1), str(file), file_digest(file), 0))
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "config.json").write_text(json.dumps({"model_type": "nothing_such", "vocab_size": 9}))
    (tmp_path / "x" / "model.safetensors").write_bytes(file.read_bytes())
    with pytest.raises(ConfigError, match="transformers cannot open"):
        load_model(tmp_path / "x", torch.float32)
    (tmp_path / "x" / "config.json").write_text(json.dumps({"model_type": "gemma2", "vocab_size": "many"}))
    with pytest.raises(ConfigError, match="vocab_size is 'many'"):
        outline(tmp_path / "x")
    real = builtins.__import__

    def without(name: str, *more: Any, **options: Any) -> Any:
        if name == "transformers":
            raise ImportError(name)
        return real(name, *more, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingDependency, match=r"pip install 'lehr\[transformers\]'"):
        require_transformers()
