"""Submit, cancel and swap in any order: greedy tokens are those of a slow reference."""

from __future__ import annotations

import random

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
    st.tuples(st.just("step"), st.integers(1, 6), st.just(0)),
)


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
    config = NativeConfig(max_running=4, token_budget=24, cache_tokens=cache, dtype="float32")
    engine = NativeEngine(decoder(0), config=config)
    submitted: list[Request] = []
    version = 0
    for kind, first, second in actions:
        if kind == "submit":
            draw = random.Random(second)
            prompt = [draw.randrange(256) for _ in range(first)]
            submitted.append(engine.submit(prompt, Sampling(temperature=0, max_tokens=NEW)))
        elif kind == "cancel" and engine.live():
            engine.cancel(engine.live()[first % len(engine.live())])
        elif kind == "swap":
            version += 1
            engine.offer(Version(0, version), pack(decoder(version)))
            engine.activate(Version(0, version), "recompute" if first else "keep")
        elif kind == "step":
            for _ in range(first):
                engine.step()
        assert engine._scheduler.pool.audit() == []
    for _ in range(2000):
        if engine.idle:
            break
        engine.step()
    assert engine.idle and engine.stats().blocks_held == 0
    plain = {n: decoder(n) for n in range(version + 1)}
    for request in submitted:
        done = request.completion()
        assert done.stop == "abort" or request.own == NEW
        if done.kv_policy != "exact":
            continue
        for i, (token, packed) in enumerate(zip(done.tokens.tolist(), done.versions.tolist(), strict=True)):
            expected, lead = best(plain[Version.unpack(packed).n], request.tokens[: request.prompt_length + i])
            assert token == expected or lead < 1e-4
