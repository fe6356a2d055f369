"""Attention over packed spans with the processor's matrix registers: the same as
:class:`lehr.train.attention.SpanAttention`, in bfloat16, without padding and without scores in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lehr.engine.native.kernels.load import SpanKernels, span_kernels
from lehr.train.packing import Span

STEP = 32
"""Head sizes are multiples of this."""


def tile_attention(spans: Sequence[Span], head_size: int, dtype: torch.dtype) -> TileAttention | None:
    """Return the attention over ``spans``, or None where the processor, dtype, head size or layout is not one
    for it.
    """
    if dtype != torch.bfloat16 or head_size % STEP:
        return None
    kernels, ends = span_kernels(), families(spans)
    return TileAttention(spans, ends, kernels) if kernels is not None and ends is not None else None


def families(spans: Sequence[Span]) -> NDArray[np.int64] | None:
    """Return for each family (a context and all spans that see it, in order and side by side) the number of
    spans up to its end; None where a span does not follow its context.
    """
    ends: list[int] = []
    head: tuple[int, int] | None = None
    at = spans[0].start if spans else 0
    for number, span in enumerate(spans):
        if span.start != at or (span.context is not None and span.context != head):
            return None
        if span.context is None:
            head = (span.start, span.stop)
            ends.append(number)
        ends[-1] = number + 1
        at = span.stop
    return np.asarray(ends, np.int64)


class TileAttention:
    """An :class:`lehr.model.base.Attend` for the spans of one micro-batch; built once, used in each layer."""

    def __init__(self, spans: Sequence[Span], ends: NDArray[np.int64], kernels: SpanKernels) -> None:
        self.kernels = kernels
        self.ends = ends
        self.spans = np.asarray([(s.start, s.stop, *(s.context or (0, 0))) for s in spans], np.int64)

    def __call__(self, layer: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Return the attention output, ``[T, H, E]``."""
        return _Attention.apply(query_THE, key_TKE, value_TKE, self)

    def plan(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[int, int, int, NDArray[np.int64]]:
        """Return where spans and ends lie, how many families there are, and the shape."""
        strides = (query.stride(0), key.stride(0), value.stride(0))
        shape = np.asarray([query.shape[1], key.shape[1], query.shape[2], *strides], np.int64)
        return self.spans.ctypes.data, self.ends.ctypes.data, len(self.ends), shape


def _dense(heads: Tensor) -> Tensor:
    """Return the same with the values of a row side by side; rows may have any distance."""
    return heads if heads.stride(2) == 1 and heads.stride(1) == heads.shape[2] else heads.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, spans: TileAttention) -> Tensor:
        query, key, value = _dense(query), _dense(key), _dense(value)
        mixed = torch.empty(query.shape, dtype=query.dtype)
        lse = torch.empty(query.shape[:2], dtype=torch.float32)
        *where, shape = spans.plan(query, key, value)
        tensors = (query, key, value, mixed, lse)
        spans.kernels.attend_spans(*(t.data_ptr() for t in tensors), *where, shape.ctypes.data)
        ctx.spans = spans
        ctx.save_for_backward(*tensors)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, mixed, lse = ctx.saved_tensors
        spans: TileAttention = ctx.spans
        flows = [torch.empty(t.shape, dtype=t.dtype) for t in (query, key, value)]
        *where, shape = spans.plan(query, key, value)
        tensors = (query, key, value, mixed, lse, grads[0].contiguous(), *flows)
        spans.kernels.attend_spans_back(*(t.data_ptr() for t in tensors), *where, shape.ctypes.data)
        return flows[0], flows[1], flows[2], None
