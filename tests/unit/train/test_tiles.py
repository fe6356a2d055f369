"""Attention in matrix registers, and the compiled functions between products, beside plain torch in float32."""

import pytest
import torch

from lehr.engine.native.kernels.load import kernels_for, span_kernels
from lehr.model.decoder import PLAIN, RMSNorm
from lehr.train.attention import SpanAttention
from lehr.train.fused import Fused
from lehr.train.packing import Span
from lehr.train.tiles import families, tile_attention

LAYOUTS = {
    "one": [Span(0, 5)],
    "several": [Span(0, 70), Span(70, 71), Span(71, 200)],
    "tree": [Span(0, 50), Span(50, 90, (0, 50)), Span(90, 93, (0, 50)), Span(93, 170, (0, 50))],
    "trees": [Span(0, 9), Span(9, 40, (0, 9)), Span(40, 140), Span(140, 150, (40, 140)), Span(150, 151)],
    "long": [Span(0, 600)],
    "edges": [Span(0, 64), Span(64, 96, (0, 64)), Span(96, 128, (0, 64))],
}


@pytest.mark.skipif(span_kernels() is None, reason="other host: the processor has no matrix registers")
@pytest.mark.parametrize("heads", [(6, 2, 64), (4, 4, 32), (9, 3, 64)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_tiles_do_what_plain_attention_does(name, heads):
    spans, rows = LAYOUTS[name], LAYOUTS[name][-1].stop
    count, kv_heads, size = heads
    source = torch.Generator().manual_seed(3)
    qkv = torch.randn(rows, count + 2 * kv_heads, size, generator=source).bfloat16()
    grad = torch.randn(rows, count, size, generator=source).bfloat16()
    found = []
    for attend, dtype in (
        (tile_attention(spans, size, torch.bfloat16), torch.bfloat16),
        (SpanAttention(spans, rows, groups=count // kv_heads), torch.float32),
    ):
        leaf = qkv.to(dtype, copy=True).requires_grad_()
        mixed = attend(0, *leaf.split((count, kv_heads, kv_heads), 1))
        mixed.backward(grad.to(dtype))
        found.append((mixed.detach().float(), leaf.grad.float()))
    for ours, plain in zip(*found, strict=True):
        assert (ours - plain).abs().max() < 0.02 * plain.abs().max()
        assert (ours - plain).norm() < 0.006 * plain.norm()


def test_a_span_apart_from_its_context_is_left_to_the_other_way():
    assert families([Span(0, 4), Span(4, 8), Span(8, 9, (0, 4))]) is None
    assert families([Span(0, 4), Span(4, 8, (0, 4)), Span(8, 9)]).tolist() == [2, 3]


@pytest.mark.skipif(kernels_for(torch.float32) is None, reason="no compiler")
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 2e-6), (torch.bfloat16, 6e-3)])
def test_compiled_functions_have_the_gradients_of_plain_ones(dtype, near):
    source = torch.Generator().manual_seed(1)
    inputs, weights = torch.randn(70, 128, generator=source), torch.randn(70, 64, generator=source)
    scale = torch.rand(128, generator=source) + 0.5
    found = []
    for ops, kind in ((Fused(kernels_for(dtype)), dtype), (PLAIN, torch.float32)):
        norm = RMSNorm(128, 1e-5)
        norm.weight.data.copy_(scale)
        norm.to(kind)
        x = inputs.to(kind, copy=True).requires_grad_()
        stream, normed = ops.norm(x, norm)
        ((ops.gated(normed).float() * weights).sum() + stream.float().square().sum()).backward()
        found.append([t.float() for t in (normed.detach(), x.grad, norm.weight.grad)])
    for ours, plain in zip(*found, strict=True):
        assert (ours - plain).norm() < near * plain.norm()
