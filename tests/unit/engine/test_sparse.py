"""Sparse attention sees what it says; prompts in tiles and long rows equal full attention."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lehr.core.config import resolve
from lehr.core.errors import ConfigError
from lehr.core.trace import Sampling, Version
from lehr.engine.native.attention import Span
from lehr.engine.native.cache import root
from lehr.engine.native.flash import chunk_attention
from lehr.engine.native.fused import FusedForward, _bounds, _place
from lehr.engine.native.kernels.build import why_not
from lehr.engine.native.kernels.load import kernels_for
from lehr.engine.native.rows import FAMILY, LONG, Rows, Slot
from lehr.engine.native.scoring import score
from lehr.engine.native.settings import NativeConfig, SparseConfig
from lehr.engine.native.sparse import TILE, choose_blocks, sparse_attention, summarise
from lehr.model.tiny import random_decoder, tiny_config

SMALL = SparseConfig(sinks=8, window=40, top_blocks=3, block=8)
HOT = Sampling(max_tokens=12, seed=5)
LENGTH = 1100
needs_kernels = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


def dense(query_LHE: Tensor, kv: Tensor, seen_LS: Tensor) -> Tensor:
    """Softmax attention over the keys that each position sees, in float64."""
    share = query_LHE.shape[1] // kv.shape[1]
    key, value = (x[:, : seen_LS.shape[-1]].repeat_interleave(share, 0).double() for x in kv)
    scores = query_LHE.transpose(0, 1).double() @ key.transpose(1, 2) * query_LHE.shape[2] ** -0.5
    return (scores.masked_fill(~seen_LS, float("-inf")).softmax(-1) @ value).transpose(0, 1).float()


def causal(start: int, count: int) -> Tensor:
    return torch.arange(start + count) <= torch.arange(start, start + count)[:, None]


@pytest.fixture
def row() -> tuple[Slot, Tensor]:
    """A row of one layer with keys, values and bounds, and queries."""
    torch.manual_seed(0)
    slot = Rows(tiny_config(num_layers=1), torch.float32, SMALL.block).take(LENGTH)
    slot.lane.kv[:, :, slot.row, :, :LENGTH] = torch.randn(1, 2, 2, LENGTH, 16)
    summarise(slot, 0, 0, LENGTH, SMALL.block)
    return slot, torch.randn(LENGTH, 4, 16)


@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 700), (1, 300), (999, 1), (640, 400)])
def test_prompts_in_tiles_equal_full_attention(row: Any, start: int, count: int) -> None:
    slot, query = row
    kv = slot.lane.kv[0, :, slot.row]
    part = query[start : start + count]
    ours = chunk_attention(part, kv[0, :, : start + count], kv[1, :, : start + count], start)
    torch.testing.assert_close(ours, dense(part, kv, causal(start, count)), atol=1e-5, rtol=0)


def test_bounds_bound_every_score(row: Any) -> None:
    slot, _ = row
    summarised = LENGTH // SMALL.block
    for bounds, size in zip(slot.lane.bounds, (SMALL.block, SMALL.block * FAMILY), strict=True):
        for number in range(-(-summarised * SMALL.block // size)):
            keys = slot.lane.kv[0, 0, slot.row, :, number * size : min((number + 1) * size, 137 * 8)]
            low, high = bounds[0, 0, slot.row, :, number // FAMILY, :, :, number % FAMILY].unbind(1)
            assert torch.equal(low, keys.amin(1)) and torch.equal(high, keys.amax(1))


def test_bounds_follow_keys_that_are_written_again(row: Any) -> None:
    slot, _ = row
    slot.summarised = 1096
    for start, end in ((1000, 1010), (1003, 1019)):  # the second as after a draft that was refused
        slot.lane.kv[0, 0, slot.row, :, start:end] = torch.randn(2, end - start, 16) * 5
        summarise(slot, 0, start, end, SMALL.block)
        slot.summarised = end // SMALL.block * SMALL.block
    again = Rows(tiny_config(num_layers=1), torch.float32, SMALL.block).take(LENGTH)
    again.lane.kv[:, :, 0] = slot.lane.kv[:, :, slot.row]
    summarise(again, 0, 0, 1016, SMALL.block)
    fine, other = slot.lane.bounds[0][0, 0, slot.row], again.lane.bounds[0][0, 0, 0]
    families = 1016 // SMALL.block // FAMILY
    assert torch.equal(fine[:, :families], other[:, :families])
    rest = 1016 // SMALL.block % FAMILY
    assert torch.equal(fine[:, families, ..., :rest], other[:, families, ..., :rest])


def test_positions_see_sinks_window_and_the_chosen_blocks(row: Any) -> None:
    slot, query = row
    kv = slot.lane.kv[0, :, slot.row]
    start, count = 300, 2 * TILE + 50
    chosen: list[tuple[Tensor, Tensor]] = []

    def choose(query: Tensor, slot: Slot, layer: int, local: Tensor, sparse: SparseConfig) -> Tensor:
        chosen.append((local, choose_blocks(query, slot, layer, local, sparse)))
        return chosen[-1][1]

    ours = sparse_attention(query[start : start + count], slot, 0, start, SMALL, choose)
    locals_N = torch.cat([local for local, _ in chosen])
    blocks_NKC = torch.cat([blocks for _, blocks in chosen])
    block_S = torch.arange(start + count) // SMALL.block
    tile_L = torch.searchsorted(torch.tensor([384, 512]), torch.arange(start, start + count), right=True)
    for group in range(2):
        heads = slice(2 * group, 2 * group + 2)
        seen = torch.stack([torch.isin(block_S, blocks_NKC[n, group]) for n in range(len(locals_N))])
        seen = (seen | (block_S < 1) | (block_S >= locals_N[:, None]))[tile_L] & causal(start, count)
        expected = dense(query[start : start + count, heads], kv[:, group : group + 1], seen)
        torch.testing.assert_close(ours[:, heads], expected, atol=1e-5, rtol=0)
    starts = torch.tensor([300, 384, 512])
    assert torch.equal(locals_N, (starts + 1 - SMALL.window) // SMALL.block)
    assert (blocks_NKC >= 1).all() and (blocks_NKC < locals_N[:, None, None]).all()
    assert all(len(set(ids.tolist())) == SMALL.top_blocks for ids in blocks_NKC.flatten(0, 1))


def test_a_key_that_stands_out_is_seen_wherever_it_is(row: Any) -> None:
    slot, query = row
    for at in (70, 333, 801):
        slot.lane.kv[0, 0, slot.row, 1, at] = 6 * query[1000, 2]
        summarise(slot, 0, at, LENGTH, SMALL.block)
        local = torch.tensor([(1001 - SMALL.window) // SMALL.block])
        near = query[1000:1001].unflatten(1, (2, 2)).transpose(0, 1)[None].flatten(2, 3)
        assert at // SMALL.block in choose_blocks(near, slot, 0, local, SMALL)[0, 1]
        slot.lane.kv[0, 0, slot.row, 1, at] = 0


def test_few_blocks_are_all_seen(row: Any) -> None:
    slot, query = row
    kv = slot.lane.kv[0, :, slot.row]
    exact = SMALL.exact_tokens
    ours = sparse_attention(query[: exact + 1], slot, 0, 0, SMALL)
    full = dense(query[: exact + 1], kv, causal(0, exact + 1))
    torch.testing.assert_close(ours[:exact], full[:exact], atol=1e-5, rtol=0)
    assert (ours[exact] - full[exact]).abs().max() > 1e-3, "the next one leaves a block out"


@needs_kernels
@pytest.mark.parametrize("head_size", [16, 24])
def test_kernels_compute_the_same(head_size: int) -> None:
    torch.manual_seed(1)
    config = tiny_config(num_layers=2).model_copy(update={"head_size": head_size})
    kernels = kernels_for(torch.float32)
    assert kernels is not None
    slot = Rows(config, torch.float32, SMALL.block).take(6000)
    slot.lane.kv[:, :, slot.row, :, :6000] = torch.randn(2, 2, 2, 6000, head_size)
    query = torch.randn(6000, 4, head_size)
    summarise(slot, 1, 0, 6000, SMALL.block)
    positions = np.array([0, 7, 78, 79, 80, 500, 4095, 4096, 5999])
    picked = query[positions].contiguous()
    places = np.array([_place(Span(slot, 0, 1, 0))] * 9, np.int64)
    bounds = np.array([_bounds(slot)] * 9, np.int64)
    out = torch.empty_like(picked)
    shape = (1, 9, 4, 2, head_size)
    at, where = places.ctypes.data, positions.ctypes.data
    kernels.attend_split(picked.data_ptr(), out.data_ptr(), at, where, *shape)
    kv = slot.lane.kv[1, :, slot.row]
    for n, position in enumerate(positions):
        full = dense(picked[n : n + 1], kv, causal(int(position), 1))
        torch.testing.assert_close(out[n : n + 1], full, atol=1e-5, rtol=0)
    kernels.attend_sparse(
        picked.data_ptr(), out.data_ptr(), at, bounds.ctypes.data, where, *shape,
        SMALL.sink_blocks, SMALL.window, SMALL.top_blocks, SMALL.block,
    )  # fmt: skip
    plain = [sparse_attention(picked[n : n + 1], slot, 1, int(p), SMALL) for n, p in enumerate(positions)]
    torch.testing.assert_close(out, torch.cat(plain), atol=1e-5, rtol=0)
    fused = type("Fused", (), {"_kernels": kernels, "choosing_s": 0.0})
    choose = functools.partial(FusedForward._choose, fused)
    pair = (sparse_attention(query[500:1500], slot, 1, 500, SMALL, c) for c in (choose, choose_blocks))
    torch.testing.assert_close(*pair, atol=1e-5, rtol=0)


def test_a_context_that_is_seen_whole_is_exact_on_every_path(bench: Any) -> None:
    wide = {"sinks": 8, "window": 64, "top_blocks": 32, "block": 8}
    for settings in ({}, {"draft_tokens": 4}, {"cache_tokens": 512}):
        engine = bench.engine(**({"token_budget": 48} | settings), sparse=wide)
        requests = [engine.submit(bench.prompt(n) * 2, HOT) for n in (10, 60, 130)]
        bench.run(engine, *requests)
        again = engine.submit(bench.prompt(130) * 2, HOT)
        bench.run(engine, again)
        assert again.cached_tokens > 250 or settings.get("cache_tokens")
        assert all(bench.agrees(r) for r in (*requests, again))


def test_e20_a_sparse_context_says_so_and_serves_no_exact_one(bench: Any) -> None:
    narrow = {"sinks": 8, "window": 32, "top_blocks": 2, "block": 8}
    engine = bench.engine(sparse=narrow)
    request = engine.submit(bench.prompt(300), HOT)
    bench.run(engine, request)
    assert request.completion().kv_policy == "sparse"
    assert not bench.agrees(request), "or nothing was left out"
    seeds = {
        root(Version(0, 0), engine.dtype),
        engine._scheduler.seed,
        bench.engine(sparse=narrow | {"top_blocks": 3})._scheduler.seed,
    }
    assert len(seeds) == 3 and root(Version(0, 0), engine.dtype) == bench.engine()._scheduler.seed
    running = engine.submit(bench.prompt(50), HOT)
    engine.step()
    bench.swap(engine, seed=2)
    assert len({engine._scheduler.seed, *seeds}) == 4, "after new weights as well"
    bench.run(engine, running)
    assert running.completion().kv_policy == "sparse_kept_across_versions"


def test_a_sparse_decode_does_not_depend_on_how_the_prompt_was_cut(bench: Any) -> None:
    narrow = {"sinks": 8, "window": 128, "top_blocks": 16, "block": 8}
    values = []
    for budget in (TILE, 4 * TILE):
        engine = bench.engine(token_budget=budget, sparse=narrow)
        request = engine.submit(bench.prompt(3 * TILE + 20), HOT)
        bench.run(engine, request)
        values.append(request.completion().raw_logprobs)
    assert np.abs(values[0] - values[1]).max() < 1e-4


def test_a_long_row_is_a_lane_of_its_own() -> None:
    rows = Rows(tiny_config(num_layers=1), torch.float32)
    slot = rows.take(LONG + 1)
    assert LONG < slot.lane.capacity <= LONG + 1024 and not rows.lanes
    assert slot.lane.kv.shape[2] == 1 and rows.take(LONG + 1).lane is not slot.lane
    slot.lane.free(slot, LONG)


def test_long_rows_are_exact(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lehr.engine.native import fused, rows

    for module in (fused, rows):
        monkeypatch.setattr(module, "LONG", 128)
    engine = bench.engine(token_budget=300)
    requests = [engine.submit(bench.prompt(n), HOT) for n in (20, 400, 500)]
    bench.run(engine, *requests)
    assert all(bench.agrees(r) for r in requests)
    assert set(engine._scheduler.rows.lanes) == {128}


class _Largest(TorchDispatchMode):
    """Notes how many elements the largest tensor has that is computed."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = out if isinstance(out, tuple) else (out,)
        for tensor, returned in zip(made, func._schema.returns, strict=False):
            if (
                isinstance(tensor, Tensor) and returned.alias_info is None
            ):  # neither a view nor written in place
                self.elements = max(self.elements, tensor.numel())
        return out


def test_e15_neither_logits_nor_scores_of_a_long_prompt_are_kept() -> None:
    length, words = 3000, 4096
    decoder = random_decoder(tiny_config(num_layers=1, vocab_size=words, max_positions=4096), std=0.25)
    tokens = torch.randint(0, words, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    with _Largest() as seen:
        ours = score(decoder, tokens, 1.0)
    assert seen.elements < length * 400, (
        "of length times the width of a layer; not times the length or the words"
    )
    with torch.inference_mode():
        hidden = decoder.hidden(torch.tensor(tokens), torch.arange(length), _everything)
        logits = decoder.logits(hidden[-101:-1])
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[-100:])[:, None])[:, 0]
    assert np.abs(ours[-100:] - expected.numpy()).max() < 1e-4


def _everything(layer: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
    kv = torch.stack((key_TKE.transpose(0, 1), value_TKE.transpose(0, 1)))
    return dense(query_THE, kv, causal(0, len(query_THE)))


@pytest.mark.parametrize("sparse", [None, SMALL])
def test_memory_of_a_long_prompt_grows_with_the_chunk_only(bench: Any, sparse: SparseConfig | None) -> None:
    largest = []
    for length in (900, 1900):
        engine = bench.engine(token_budget=256, sparse=sparse)
        request = engine.submit(bench.prompt(length), Sampling(max_tokens=1))
        while request.remaining > 256:
            engine.step()
        with _Largest() as seen:
            bench.run(engine, request)
        largest.append(seen.elements)
    assert max(largest) < 256 * 1900, "or scores of the chunk over all keys exist at once"


def test_sparse_attention_refuses_int8_keys() -> None:
    with pytest.raises(ConfigError, match="int8"):
        resolve(NativeConfig, {"sparse": {}, "kv_dtype": "int8"})


def test_long_int8_rows_are_what_short_ones_are(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lehr.engine.native import fused, rows

    values = []
    for long in (1 << 14, 128):
        for module in (fused, rows):
            monkeypatch.setattr(module, "LONG", long)
        engine = bench.engine(token_budget=300, kv_dtype="int8")
        request = engine.submit(bench.prompt(400), HOT)
        bench.run(engine, request)
        values.append(request.completion().raw_logprobs)
    assert np.array_equal(values[0], values[1])
