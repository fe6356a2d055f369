"""Exact attention over packed spans: each sees itself causally, and its shared context in full.

The part inside spans is computed for all spans of similar length at once; the part over a shared context is
one matrix product for all spans that share it. Both are merged by their log-sum-exp, and the backward pass
recomputes probabilities from it (the decomposition of FlashAttention, Dao et al. 2022, arXiv 2205.14135),
so that no score matrix is kept. Long spans are cut into chunks whose context is what comes before.

Shape letters: T packed rows, M padded rows, K key-value heads, G query heads per key-value head, E head size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lehr.train.packing import Span

CHUNK = 256
"""Spans are cut to at most this many rows."""


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int
    length: int
    context: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Pieces padded to one length. ``first`` is the bucket's first padded row. ``contexts`` maps a run of
    pieces ``[a, b)`` to the packed rows that all of them see.
    """

    first: int
    count: int
    length: int
    mask_LL: Tensor
    contexts: tuple[tuple[int, int, Tensor], ...]


class SpanAttention:
    """An :class:`lehr.model.base.Attend` for the spans of one micro-batch; built once, used in each layer."""

    def __init__(self, spans: Sequence[Span], rows: int, *, groups: int, chunk: int = CHUNK) -> None:
        """``rows``: packed rows in all, covered by ``spans``. ``groups``: query heads per key-value head."""
        pieces = sorted(_cut(spans, chunk), key=lambda p: -p.length)
        gather = torch.empty(0, dtype=torch.int64)
        parts: list[Tensor] = []
        self.buckets: list[_Bucket] = []
        self.groups = groups
        self.padded = 0
        while pieces:
            longest = pieces[0].length
            taken = [p for p in pieces if 2 * p.length > longest or longest <= 16]
            pieces = pieces[len(taken) :]
            taken.sort(key=lambda p: (p.context, p.start))
            parts.extend(p.start + torch.arange(longest).clamp(max=p.length - 1) for p in taken)
            mask = torch.full((longest, longest), -math.inf).triu(1).repeat_interleave(groups, 0)
            self.buckets.append(_Bucket(self.padded, len(taken), longest, mask, tuple(_runs(taken))))
            self.padded += longest * len(taken)
        gather = torch.cat(parts)
        self.gather_M = gather
        real = torch.ones(self.padded, dtype=torch.bool)
        real[1:] = gather[1:] != gather[:-1]
        self.pad_M = ~real
        self.scatter_T = torch.empty(rows, dtype=torch.int64)
        self.scatter_T[gather[real]] = torch.arange(self.padded)[real]

    def __call__(self, layer: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Return the attention output, ``[T, H, E]``."""
        return _Attention.apply(query_THE, key_TKE, value_TKE, self)

    def spread(self, heads_TXE: Tensor, kv_heads: int) -> list[Tensor]:
        """Return, per bucket, ``[K, n, L * (X / K), E]``: rows gathered, padded, heads brought forward."""
        rows, heads, size = heads_TXE.shape
        padded = heads_TXE.reshape(rows, heads * size).index_select(0, self.gather_M)
        per = heads // kv_heads
        return [
            padded[b.first : b.first + b.count * b.length]
            .view(b.count, b.length, kv_heads, per, size)
            .permute(2, 0, 1, 3, 4)
            .reshape(kv_heads, b.count, b.length * per, size)
            for b in self.buckets
        ]

    def collect(self, parts: Sequence[Tensor], heads: int) -> Tensor:
        """Invert :meth:`spread`, dropping the padding."""
        kv_heads, size = parts[0].shape[0], parts[0].shape[-1]
        per = heads // kv_heads
        padded = torch.empty(self.padded, heads * size, dtype=parts[0].dtype)
        for bucket, part in zip(self.buckets, parts, strict=True):
            into = padded[bucket.first : bucket.first + bucket.count * bucket.length]
            into.view(bucket.count, bucket.length, kv_heads, per, size).copy_(
                part.view(kv_heads, bucket.count, bucket.length, per, size).permute(1, 2, 0, 3, 4)
            )
        return padded.index_select(0, self.scatter_T).view(-1, heads, size)

    def pads(self, bucket: _Bucket) -> Tensor:
        """Return bool ``[n, L * G, 1]``, True at padded query rows."""
        pads = self.pad_M[bucket.first : bucket.first + bucket.count * bucket.length]
        return pads.view(bucket.count, bucket.length).repeat_interleave(self.groups, 1)[..., None]


def _cut(spans: Sequence[Span], chunk: int) -> list[_Piece]:
    pieces: list[_Piece] = []
    for span in spans:
        before = (span.context,) if span.context else ()
        for start in range(span.start, span.stop, chunk):
            seen = (*before, (span.start, start)) if start > span.start else before
            pieces.append(_Piece(start, min(chunk, span.stop - start), seen))
    return pieces


def _runs(pieces: Sequence[_Piece]) -> list[tuple[int, int, Tensor]]:
    runs: list[tuple[int, int, Tensor]] = []
    first = 0
    for last in range(1, len(pieces) + 1):
        if last == len(pieces) or pieces[last].context != pieces[first].context:
            if pieces[first].context:
                rows = torch.cat([torch.arange(a, b) for a, b in pieces[first].context])
                runs.append((first, last, rows))
            first = last
    return runs


def _forward(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, mask)
    high = scores.amax(-1, keepdim=True)
    weights = scores.sub_(high).exp_()
    mass = weights.sum(-1, keepdim=True)
    return torch.bmm(weights.to(value.dtype), value).float().div_(mass), high + mass.log()


def _backward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, grad: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    weights = _scores(query, key, mask).sub_(lse).exp_()
    grad_value = torch.bmm(weights.to(value.dtype).transpose(1, 2), grad)
    inner = torch.bmm(grad, value.transpose(1, 2)).float()
    flow = inner.sub_(delta).mul_(weights).mul_(query.shape[-1] ** -0.5).to(query.dtype)
    return torch.bmm(flow, key), torch.bmm(flow.transpose(1, 2), query), grad_value


def _scores(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    scale = query.shape[-1] ** -0.5
    if query.dtype != torch.float32:
        scores = torch.bmm(query, key.transpose(1, 2)).float().mul_(scale)
        return scores if mask is None else scores.add_(mask)
    if mask is None:
        empty = query.new_empty(()).expand(query.shape[0], query.shape[1], key.shape[1])
        return torch.baddbmm(empty, query, key.transpose(1, 2), beta=0, alpha=scale)
    return torch.baddbmm(mask, query, key.transpose(1, 2), alpha=scale)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: SpanAttention) -> Tensor:
        heads, kv_heads = query.shape[1], key.shape[1]
        queries, keys, values = (
            plan.spread(query, kv_heads),
            plan.spread(key, kv_heads),
            plan.spread(value, kv_heads),
        )
        outputs: list[Tensor] = []
        sums: list[Tensor] = []
        for b, q, k, v in zip(plan.buckets, queries, keys, values, strict=True):
            out, lse = _forward(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), b.mask_LL)
            out, lse = out.view(q.shape), lse.view(*q.shape[:-1], 1)
            for first, last, rows in b.contexts:
                part = q[:, first:last].flatten(1, 2)
                more, more_lse = _forward(part, _rows(key, rows), _rows(value, rows), None)
                own, own_lse = out[:, first:last], lse[:, first:last]
                more, more_lse = more.view(own.shape), more_lse.view(own_lse.shape)
                own.lerp_(more, torch.sigmoid(more_lse - own_lse))
                own_lse.copy_(torch.logaddexp(own_lse, more_lse))
            lse.masked_fill_(plan.pads(b), math.inf)
            outputs.append(out.to(query.dtype))
            sums.append(lse)
        ctx.plan = plan
        mixed = plan.collect(outputs, heads)
        ctx.save_for_backward(query, key, value, mixed, *sums)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, mixed, *sums = ctx.saved_tensors
        plan: SpanAttention = ctx.plan
        heads, kv_heads = query.shape[1], key.shape[1]
        queries, keys, values = (
            plan.spread(query, kv_heads),
            plan.spread(key, kv_heads),
            plan.spread(value, kv_heads),
        )
        deltas = plan.spread((grads[0].float() * mixed).sum(-1, keepdim=True), kv_heads)
        grad_outs = plan.spread(grads[0], kv_heads)
        grad_queries: list[Tensor] = []
        grad_keys: list[Tensor] = []
        grad_values: list[Tensor] = []
        shared: list[tuple[Tensor, Tensor, Tensor]] = []
        for b, q, k, v, g, lse, delta in zip(
            plan.buckets, queries, keys, values, grad_outs, sums, deltas, strict=True
        ):
            fq, fk, fv, fg, f_lse, f_delta = (x.flatten(0, 1) for x in (q, k, v, g, lse, delta))
            dq, dk, dv = _backward(fq, fk, fv, b.mask_LL, fg, f_lse, f_delta)
            dq = dq.view(q.shape)
            for first, last, rows in b.contexts:
                part, grad, part_lse, part_delta = (x[:, first:last].flatten(1, 2) for x in (q, g, lse, delta))
                more, dk_rows, dv_rows = _backward(
                    part, _rows(key, rows), _rows(value, rows), None, grad, part_lse, part_delta
                )
                dq[:, first:last].add_(more.view(dq[:, first:last].shape))
                shared.append((rows, dk_rows, dv_rows))
            grad_queries.append(dq)
            grad_keys.append(dk.view(k.shape))
            grad_values.append(dv.view(v.shape))
        grad_key = plan.collect(grad_keys, kv_heads)
        grad_value = plan.collect(grad_values, kv_heads)
        for rows, dk_rows, dv_rows in shared:
            grad_key.index_add_(0, rows, dk_rows.transpose(0, 1))
            grad_value.index_add_(0, rows, dv_rows.transpose(0, 1))
        return plan.collect(grad_queries, heads), grad_key, grad_value, None


def _rows(heads_TKE: Tensor, rows: Tensor) -> Tensor:
    return heads_TKE.index_select(0, rows).transpose(0, 1).contiguous()
