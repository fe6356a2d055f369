"""Attention over packed spans is exact, forward and backward."""

import pytest
import torch

from lehr.train.attention import SpanAttention
from lehr.train.packing import Span

LAYOUTS = {
    "one": [Span(0, 37)],
    "apart": [Span(0, 5), Span(5, 40), Span(40, 41), Span(41, 60)],
    "tree": [Span(0, 20), Span(20, 31, (0, 20)), Span(31, 33, (0, 20)), Span(33, 60, (0, 20))],
    "trees": [Span(0, 9), Span(9, 20, (0, 9)), Span(20, 60), Span(60, 61, (20, 60)), Span(61, 90, (20, 60))],
}


def visible(spans):
    mask = torch.zeros(spans[-1].stop, spans[-1].stop, dtype=torch.bool)
    for span in spans:
        mask[span.start : span.stop, span.start : span.stop] = torch.ones(len(span), len(span)).tril().bool()
        if span.context:
            mask[span.start : span.stop, span.context[0] : span.context[1]] = True
    return mask


def reference(query, key, value, mask):
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = torch.einsum("the,she->hts", query, key) * query.shape[-1] ** -0.5
    return torch.einsum("hts,she->the", scores.masked_fill(~mask, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("chunk", [256, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_to_the_definition(layout, chunk):
    spans = LAYOUTS[layout]
    rows = spans[-1].stop
    source = torch.Generator().manual_seed(0)
    query, key, value, flow = (
        torch.randn(rows, heads, 8, generator=source, dtype=torch.float32) for heads in (6, 2, 2, 6)
    )
    inputs = [x.requires_grad_() for x in (query, key, value)]
    ours = SpanAttention(spans, rows, groups=3, chunk=chunk)(0, *inputs)
    theirs = reference(*(x.double() for x in inputs), visible(spans))
    torch.testing.assert_close(ours, theirs.float(), atol=1e-5, rtol=0)
    for one, other in zip(
        torch.autograd.grad(ours, inputs, flow), torch.autograd.grad(theirs, inputs, flow.double()), strict=True
    ):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_bfloat16_is_as_close_as_its_digits_allow():
    spans = LAYOUTS["trees"]
    rows = spans[-1].stop
    inputs = [torch.randn(rows, heads, 8).bfloat16() for heads in (6, 2, 2)]
    ours = SpanAttention(spans, rows, groups=3)(0, *inputs)
    theirs = reference(*(x.double() for x in inputs), visible(spans))
    assert ours.dtype == torch.bfloat16
    assert float((ours.double() - theirs).abs().mean()) < 5e-3
