"""Each kernel gives what torch's operations give, and a forward with them what a forward without them gives."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lehr.core.trace import Sampling
from lehr.engine.native.attention import Span, StepAttention
from lehr.engine.native.fused import SHORT, FusedForward
from lehr.engine.native.kernels import build, load
from lehr.engine.native.kernels.load import Kernels, kernels_for
from lehr.engine.native.rows import Rows
from lehr.engine.native.sampler import draw, draw_whole, uniform
from lehr.model.config import ModelConfig
from lehr.model.decoder import Decoder
from lehr.model.rotary import rotate
from lehr.model.tiny import random_decoder, tiny_config

pytestmark = pytest.mark.skipif(bool(build.why_not()), reason=build.why_not())
DTYPES = (torch.float32, torch.bfloat16)
CLOSE = {torch.float32: {"rtol": 2e-6, "atol": 2e-6}, torch.bfloat16: {"rtol": 8e-3, "atol": 1e-5}}
"""bfloat16: one unit in the last place, where a sum in another order falls on the other side of a tie."""


def compiled(dtype: torch.dtype) -> Kernels:
    found = kernels_for(dtype)
    assert found is not None
    return found


def values(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (7, 64), (3, 33), (600, 576)])
def test_norm_adds_and_scales(dtype: torch.dtype, rows: int, size: int) -> None:
    x, added, weight = (values(*s, dtype=dtype, seed=i) for i, s in enumerate([(rows, size)] * 2 + [(size,)]))
    summed = x + added
    expected = functional.rms_norm(summed, (size,), weight, 1e-5)
    out = torch.empty_like(x)
    compiled(dtype).norm(x.data_ptr(), added.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size, 1e-5)
    assert torch.equal(x, summed), "the residual stream is the rounded sum"
    torch.testing.assert_close(out, expected, **CLOSE[dtype])
    compiled(dtype).norm(x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), rows, size, 1e-5)
    torch.testing.assert_close(out, expected, **CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 40.0])
def test_gated_is_silu_times_up(dtype: torch.dtype, scale: float) -> None:
    both = values(9, 2 * 77, dtype=dtype, scale=scale)
    gate, up = both.chunk(2, dim=-1)
    out = torch.empty(9, 77, dtype=dtype)
    compiled(dtype).gated(both.data_ptr(), out.data_ptr(), 9, 77)
    torch.testing.assert_close(out, functional.silu(gate) * up, **CLOSE[dtype])


def test_draw_is_that_of_plain_operations() -> None:
    logits = values(40, 1000, dtype=torch.float32, scale=3.0)
    settings = [Sampling(temperature=t) for t in (0.0, 0.3, 0.7, 1.0, 2.0) for _ in range(8)]
    where = uniform(range(40), range(40))
    mine = draw_whole(compiled(torch.float32), logits, settings, where)
    theirs = draw(logits, settings, where)
    assert mine.tokens == theirs.tokens
    for name in ("logprobs", "raw_logprobs", "kept_mass"):
        assert np.allclose(getattr(mine, name), getattr(theirs, name), atol=2e-6), name


def test_draw_follows_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -5.0, 3.0] * 103])
    count = 20_000
    where = uniform(range(count), [0] * count)
    drawn = draw_whole(compiled(torch.float32), logits.repeat(count, 1), [Sampling()] * count, where)
    seen = torch.bincount(torch.tensor(drawn.tokens) % 5, minlength=5) / count
    expected = logits[0, :5].softmax(0)
    assert (seen - expected).abs().max() < 4 * (0.25 / count) ** 0.5


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_draw_hides_no_broken_logits(broken: float) -> None:
    logits = torch.zeros(2, 300)
    logits[1, 17] = broken
    for sampling in (Sampling(), Sampling(temperature=0.0)):
        drawn = draw_whole(compiled(torch.float32), logits, [sampling] * 2, uniform([1, 2], [0, 0]))
        assert np.isfinite(drawn.kept_mass).tolist() == [True, False]


def test_draw_never_takes_a_word_of_no_weight() -> None:
    logits = torch.full((3, 700), float("-inf"))
    logits[:, 300] = 0.0
    ends = np.array([0.0, 0.5, 1 - 2**-53])
    drawn = draw_whole(compiled(torch.float32), logits, [Sampling()] * 3, ends)
    assert drawn.tokens == [300] * 3


def close(mine: Tensor, theirs: Tensor) -> bool:
    """Whether two results differ by no more than sums in another order do. In bfloat16 the plain
    way also rounds scores and shares of single tokens, which the kernel keeps in float32.
    """
    difference = (mine.float() - theirs.float()).abs()
    if mine.dtype is torch.float32:
        return difference.max().item() < 2e-5
    return difference.mean().item() < 0.015 and difference.max().item() < 0.2


def shape(head_size: int, *, qk_norm: bool) -> ModelConfig:
    return tiny_config(num_layers=2, hidden_size=4 * head_size).model_copy(update={"qk_norm": qk_norm})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_size", "qk_norm"), [(16, False), (64, False), (128, True), (24, True)])
def test_forward_is_that_of_plain_operations(dtype: torch.dtype, head_size: int, qk_norm: bool) -> None:
    config = shape(head_size, qk_norm=qk_norm)
    decoder = random_decoder(config, dtype=dtype, std=0.1)
    fused = FusedForward(decoder, compiled(dtype))
    ours, plain = Rows(config, dtype), Rows(config, dtype)
    tokens = torch.randint(0, 256, (4, 350), generator=torch.Generator().manual_seed(1))
    lengths = [100, 20, 1, 277]
    rows = [(ours.take(350 if n != 2 else 600), plain.take(350 if n != 2 else 600)) for n in range(4)]
    done = [0] * 4
    for counts in (lengths, [1, 1, 1, 1], [1, 30, 1, 1], [1, 1, 1, 1]):
        order = sorted(range(4), key=lambda n: (counts[n] > 1, counts[n] > SHORT, rows[n][0].lane.capacity))
        spans: list[list[Span]] = [[], []]
        packed: list[int] = []
        for n in order:
            for side in range(2):
                spans[side].append(Span(rows[n][side], done[n], counts[n], len(packed)))
            packed += tokens[n, done[n] : done[n] + counts[n]].tolist()
            done[n] += counts[n]
        singles = sum(count == 1 for count in counts)
        with torch.inference_mode():
            mine = fused.hidden(packed, spans[0])
            attention = StepAttention(spans[1][:singles], spans[1][singles:], dtype)
            positions = torch.cat([torch.arange(s.start, s.start + s.count) for s in spans[1]])
            theirs = decoder.hidden(torch.tensor(packed), positions, attention)
        assert close(mine, theirs), counts
    for side in zip(ours.lanes.values(), plain.lanes.values(), strict=True):
        assert close(side[0].kv, side[1].kv), "keys and values are stored in the same places"


def test_rotation_is_exact_in_both_formats() -> None:
    for dtype in DTYPES:
        config = shape(64, qk_norm=False)
        decoder: Decoder = random_decoder(config, dtype=dtype)
        heads, size = 4, 64
        qkv = values(3, (heads + 4) * size, dtype=dtype)
        at = torch.tensor([0, 5, 1999])
        cos, sin = decoder.rotary.angles(at, dtype)
        query = torch.empty(3, heads, size, dtype=dtype)
        row = torch.zeros(2, 2, 2048, size, dtype=dtype)
        place = np.array([[row.data_ptr(), 0, row.stride(0), row.stride(1)]] * 3, np.int64)
        compiled(dtype).rotate(
            qkv.data_ptr(), cos.data_ptr(), sin.data_ptr(), None, None, query.data_ptr(), place.ctypes.data,
            at.numpy().ctypes.data, 0, 3, heads, 2, size, 1e-5,
        )  # fmt: skip
        turned = rotate(qkv.view(3, heads + 4, size)[:, : heads + 2], cos, sin)
        torch.testing.assert_close(query, turned[:, :heads], **CLOSE[dtype])
        torch.testing.assert_close(row[0][:, at].transpose(0, 1), turned[:, heads:], **CLOSE[dtype])
        assert torch.equal(row[1][:, at].transpose(0, 1), qkv.view(3, heads + 4, size)[:, heads + 2 :])


def test_without_a_compiler_the_engine_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for cached in (build.why_not, load._library):
        cached.cache_clear()
    monkeypatch.setenv("CXX", "no-such-compiler")
    try:
        assert kernels_for(torch.float32) is None and kernels_for(torch.bfloat16) is None
        assert [r.getMessage() for r in caplog.records] == [
            "The engine samples at about half its speed: no kernels, there is no C++ compiler. "
            "Install a compiler: `apt-get install g++`"
        ]
    finally:
        monkeypatch.undo()
        for cached in (build.why_not, load._library):
            cached.cache_clear()


def test_a_library_that_others_may_write_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LEHR_HOME", str(tmp_path))
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="can be written by others"):
        build.built.__wrapped__()
    folder.chmod(0o700)
    built = build.built.__wrapped__()
    assert ctypes.CDLL(str(built)) and built.parent == folder
    (tmp_path / "elsewhere.so").write_bytes(b"")
    built.unlink()
    built.symlink_to(tmp_path / "elsewhere.so")
    assert not build._is_ours(built), "links are not followed"
