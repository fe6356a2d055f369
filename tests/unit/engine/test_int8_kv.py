"""Keys and values as int8: how near, how small, and that nothing takes them for exact ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lehr.core.trace import Sampling, Version
from lehr.engine.native.attention import Span, StepAttention
from lehr.engine.native.cache import root
from lehr.engine.native.fused import FusedForward
from lehr.engine.native.kernels.build import why_not
from lehr.engine.native.kernels.load import kernels_for
from lehr.engine.native.quantise import load, spread, store, stored_width
from lehr.engine.native.rows import Rows, token_bytes
from lehr.model.tiny import random_decoder, tiny_config
from lehr.rollout.assemble import SegmentBuilder

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("size", [16, 24, 64, 128])
def test_a_stored_vector_is_near_by_half_a_step(size: int) -> None:
    x = (
        torch.randn(5, 3, size, generator=torch.Generator().manual_seed(0))
        * torch.tensor([0.01, 1, 300])[:, None]
    )
    kept = store(x, torch.int8)
    assert kept.shape == (5, 3, stored_width(size, torch.int8)) and kept.dtype is torch.int8
    step = x.abs().amax(-1, keepdim=True) / 127
    assert ((load(kept, size, torch.float32) - x).abs() <= 0.501 * step).all()
    assert load(store(torch.zeros(2, size), torch.int8), size, torch.float32).abs().max() == 0


def test_spreading_keeps_products_and_evens_out() -> None:
    q, k = (torch.randn(40, 24, generator=torch.Generator().manual_seed(n)) for n in range(2))
    torch.testing.assert_close(spread(q) @ spread(k).T, q @ k.T, rtol=1e-4, atol=1e-4)
    one = torch.zeros(64)
    one[3] = 8.0
    assert spread(one).abs().max() == pytest.approx(1.0)


def test_it_takes_little_more_than_half_of_bfloat16() -> None:
    config = tiny_config(hidden_size=256)
    assert config.head_size == 64
    assert token_bytes(config, torch.int8) <= 0.55 * token_bytes(config, torch.bfloat16)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "qk_norm"), [(24, True), (64, False), (128, True)])
def test_kernels_and_plain_operations_agree(dtype: torch.dtype, head_size: int, qk_norm: bool) -> None:
    config = tiny_config(num_layers=2, hidden_size=4 * head_size).model_copy(update={"qk_norm": qk_norm})
    decoder = random_decoder(config, dtype=dtype, std=0.1)
    kernels = kernels_for(dtype)
    assert kernels is not None
    fused = FusedForward(decoder, kernels)
    ours, plain = Rows(config, torch.int8).take(400), Rows(config, torch.int8).take(400)
    tokens = torch.randint(0, 256, (330,), generator=torch.Generator().manual_seed(1)).tolist()
    done = 0
    for count in (300, 1, 20, 1):
        part = tokens[done : done + count]
        with torch.inference_mode():
            mine = fused.hidden(part, [Span(ours, done, count, 0)])
            span = [Span(plain, done, count, 0)]
            attention = StepAttention(span if count == 1 else [], span if count > 1 else [], dtype)
            theirs = decoder.hidden(torch.tensor(part), torch.arange(done, done + count), attention)
        difference = (mine.float() - theirs.float()).abs()
        bound = (5e-3, 0.2) if dtype is torch.float32 else (0.02, 0.4)
        assert difference.mean() < bound[0] and difference.max() < bound[1], count
        done += count


def test_e20_log_probabilities_stay_near(bench: Any) -> None:
    """Through chunks, single tokens, the cache and preemption. This random model is sharp: exact ones are off
    by 1e-5, broken ones by 1."""
    engine = bench.engine(kv_dtype="int8", cache_tokens=256, token_budget=32)
    requests = [engine.submit(bench.prompt(60, i), Sampling(max_tokens=40, seed=i)) for i in range(4)]
    bench.run(engine, *requests)
    assert engine._scheduler.preemptions > 0
    found = []
    for request in requests:
        said = bench.reference(request.tokens)[request.prompt_length - 1 :]
        found.append(np.abs(said - request.completion().raw_logprobs))
    assert 1e-5 < np.concatenate(found).mean() < 0.1


def test_e20_the_policy_is_in_the_trace(bench: Any) -> None:
    engine = bench.engine(kv_dtype="int8")
    before, across = (engine.submit(bench.prompt(20, n), Sampling(max_tokens=6)) for n in range(2))
    engine.cancel(before)
    for _ in range(3):
        engine.step()
    bench.swap(engine, seed=2)
    bench.run(engine, across)
    exact = bench.engine().submit([1], Sampling(max_tokens=0)).completion()
    assert (before.completion().kv_policy, across.completion().kv_policy) == (
        "quantized",
        "quantized_kept_across_versions",
    )
    for order in ((across, before), (before, across)):
        builder = SegmentBuilder(Sampling())
        for request in order:
            builder.append(request.completion())
        builder.append(exact)
        assert builder.build().kv_policy == "quantized_kept_across_versions", "the least exact of all turns"


def test_e20_quantised_blocks_have_other_names(bench: Any, tmp_path: Path) -> None:
    assert root(Version(0, 1), torch.bfloat16) != root(Version(0, 1), torch.bfloat16, "quantized")
    names = []
    for kv_dtype in ("auto", "int8"):
        engine = bench.engine(kv_dtype=kv_dtype)
        request = engine.submit(bench.prompt(40), Sampling(max_tokens=1))
        bench.run(engine, request)
        names.append(set(request.chain))
    assert not names[0] & names[1]


def test_what_is_not_finite_stays_so(bench: Any) -> None:
    for broken in (float("nan"), float("inf")):
        x = torch.ones(2, 16)
        x[1, 3] = broken
        kept = load(store(x, torch.int8), 16, torch.float32)
        assert kept[0].isfinite().all() and not kept[1].isfinite().all()
