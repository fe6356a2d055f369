"""Submit, cancel, preempt, swap and tier moves in any order: greedy tokens are those of a slow reference."""

from __future__ import annotations

import random
import tempfile
import time

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.core.trace import Sampling, Version
from lehr.engine.native.engine import NativeEngine
from lehr.engine.native.packing import pack
from lehr.engine.native.request import Request
from lehr.engine.native.settings import NativeConfig
from lehr.model.decoder import Decoder
from lehr.model.tiny import random_decoder, tiny_config

SHAPE = tiny_config(num_layers=2, hidden_size=32)
NEW = 12
action = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 40), st.integers(0, 2)),
    st.tuples(st.just("cancel"), st.integers(0, 7), st.just(0)),
    st.tuples(st.just("swap"), st.sampled_from([0, 1]), st.just(0)),
    st.tuples(st.just("preempt"), st.integers(0, 7), st.just(0)),
    st.tuples(st.just("settle"), st.just(0), st.just(0)),
    st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
)
TINY_TIERS = {"tier_memory_bytes": 30_000, "tier_disk_bytes": 120_000}
"""Of 1,024 bytes a token: a segment or less in memory, a few on disk."""


def decoder(n: int) -> Decoder:
    return random_decoder(SHAPE, seed=100 + n, std=0.3)


def best(plain: Decoder, tokens: list[int]) -> tuple[int, float]:
    """Return the reference's next token, and how far ahead of the second it is."""

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed[0].transpose(0, 1)

    with torch.no_grad():
        hidden = plain.hidden(torch.tensor(tokens), torch.arange(len(tokens)), attend)
        top = plain.logits(hidden[-1:])[0].topk(2)
    return int(top.indices[0]), float(top.values[0] - top.values[1])


@settings(max_examples=25, deadline=None)
@given(actions=st.lists(action, min_size=4, max_size=24), cache=st.sampled_from([64, 96, 2048]))
def test_any_interleaving_is_exact(actions: list[tuple[str, int, int]], cache: int) -> None:
    check(actions, NativeConfig(max_running=4, token_budget=24, cache_tokens=cache, dtype="float32"))


@settings(max_examples=25, deadline=None)
@given(actions=st.lists(action, min_size=8, max_size=30), cache=st.sampled_from([184, 320]))
def test_any_interleaving_with_tiers_is_exact(actions: list[tuple[str, int, int]], cache: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = NativeConfig(
            max_running=4,
            token_budget=64,
            cache_tokens=cache,
            dtype="float32",
            tier_folder=folder,
            **TINY_TIERS,
        )
        check(actions, config, longer=4)


def check(actions: list[tuple[str, int, int]], config: NativeConfig, longer: int = 1) -> None:
    """Run ``actions``, prompts ``longer`` times as long, then everything that is left, and compare."""
    engine = NativeEngine(decoder(0), config=config)
    try:
        submitted, swaps = run(engine, actions, longer)
    finally:
        engine.close()
    plain = {n: decoder(n) for n in range(swaps + 1)}
    for request in submitted:
        done = request.completion()
        assert done.stop == "abort" or request.own == NEW
        assert list(done.versions) == sorted(done.versions), "versions never fall within a trace"
        if done.kv_policy != "exact":
            continue
        for i, (token, packed) in enumerate(zip(done.tokens.tolist(), done.versions.tolist(), strict=True)):
            expected, lead = best(plain[Version.unpack(packed).n], request.tokens[: request.prompt_length + i])
            assert token == expected or lead < 1e-4


@torch.inference_mode()
def run(engine: NativeEngine, actions: list[tuple[str, int, int]], longer: int) -> tuple[list[Request], int]:
    """Return the requests, all finished, and how often the weights were swapped."""
    submitted: list[Request] = []
    version = 0
    for kind, first, second in actions:
        if kind == "submit":
            draw = random.Random(second)
            prompt = [draw.randrange(256) for _ in range(first * longer)]
            submitted.append(engine.submit(prompt, Sampling(temperature=0, max_tokens=NEW)))
        elif kind == "cancel" and engine.live():
            engine.cancel(engine.live()[first % len(engine.live())])
        elif kind == "preempt" and engine._scheduler.running:
            running = engine._scheduler.running
            engine._scheduler.send_back(running[first % len(running)])
        elif kind == "settle" and engine._tiers is not None:
            engine._tiers.tiers.drain()
        elif kind == "swap":
            version += 1
            engine.offer(Version(0, version), pack(decoder(version)))
            engine.activate(Version(0, version), "recompute" if first else "keep")
        elif kind == "step":
            for _ in range(first):
                step(engine)
        assert engine._scheduler.pool.audit() == []
    for _ in range(2000):
        if engine.idle:
            break
        step(engine)
    assert engine.idle, "requests wait for ever"
    deadline = time.monotonic() + 20
    while engine.stats().blocks_held and time.monotonic() < deadline:
        time.sleep(0.001)  # a load that nobody waits for any more ends
    engine._scheduler.restart(b"")
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks_total, "every block returns"
    return submitted, version


def step(engine: NativeEngine) -> None:
    engine.step()
    stats = engine.stats()
    assert stats.blocks_free + stats.blocks_cached + stats.blocks_held == stats.blocks_total
