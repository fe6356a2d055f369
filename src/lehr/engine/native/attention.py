"""Attention of one step: single new tokens of many rows, and chunks of prompts, in one forward.

The query heads that share a key head are treated as positions of one query, so that keys and values are
read once and never repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lehr.engine.native.flash import chunk_attention
from lehr.engine.native.quantise import load, spread, store
from lehr.engine.native.rows import Lane, Slot
from lehr.engine.native.settings import SparseConfig
from lehr.engine.native.sparse import sparse_attention, summarise


@dataclass(frozen=True, slots=True)
class Span:
    """New tokens of one request: where they go, and where they stand in the step's packed tokens.

    length: that the request can reach, where the angles of its positions depend on it; else 0.
    """

    slot: Slot
    start: int
    count: int
    offset: int
    length: int = 0


def lengths(spans: Sequence[Span]) -> list[int] | None:
    """Return the length of the whole sequence of each token, or None where no span depends on its own."""
    if not any(s.length for s in spans):
        return None
    return [s.length for s in spans for _ in range(s.count)]


class StepAttention:
    """Implements ``model.base.Attend`` over working rows. ``singles`` come first in the packed tokens, those
    of one lane side by side in the order of their rows; ``chunks`` follow.
    """

    def __init__(
        self,
        singles: Sequence[Span],
        chunks: Sequence[Span],
        dtype: torch.dtype,
        sparse: SparseConfig | None = None,
    ) -> None:
        self._sparse = sparse
        self._int8 = any(s.slot.lane.kv.dtype is torch.int8 for s in (*singles, *chunks))
        if sparse is not None:
            singles, chunks = (), (*singles, *chunks)
        lanes: dict[Lane, list[Span]] = {}
        for span in singles:
            lanes.setdefault(span.slot.lane, []).append(span)
        self._singles = [_Singles(lane, spans, dtype) for lane, spans in lanes.items()]
        self._chunks = chunks

    def __call__(self, layer: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Store the new keys and values of ``layer`` and return the attention output, ``[T, H, E]``."""
        out_THE = torch.empty_like(query_THE)
        if self._int8:
            query_THE, key_TKE = spread(query_THE).to(query_THE.dtype), spread(key_TKE)
        for group in self._singles:
            group.attend(layer, query_THE, key_TKE, value_TKE, out_THE)
        for span in self._chunks:
            part = slice(span.offset, span.offset + span.count)
            kv = span.slot.lane.kv[layer, :, span.slot.row]
            end = span.start + span.count
            kv[0, :, span.start : end] = store(key_TKE[part].transpose(0, 1), kv.dtype)
            kv[1, :, span.start : end] = store(value_TKE[part].transpose(0, 1), kv.dtype)
            query = query_THE[part]
            if self._sparse is None:
                kv = load(kv[:, :, :end], query_THE.shape[2], query_THE.dtype)
                out_THE[part] = chunk_attention(query, kv[0], kv[1], span.start)
            else:
                summarise(span.slot, layer, span.start, end, self._sparse.block)
                out_THE[part] = sparse_attention(query, span.slot, layer, span.start, self._sparse)
        return out_THE


class _Singles:
    """The rows of one lane that add one token each."""

    def __init__(self, lane: Lane, spans: Sequence[Span], dtype: torch.dtype) -> None:
        self.lane = lane
        self.part = slice(spans[0].offset, spans[0].offset + len(spans))
        rows = [s.slot.row for s in spans]
        self.rows_N = torch.tensor(rows)
        self.starts_N = torch.tensor([s.start for s in spans])
        self.longest = int(self.starts_N.max()) + 1
        self.dense = rows == list(range(len(spans)))
        beyond_NS = torch.arange(self.longest) > self.starts_N[:, None]
        mask_NS = torch.zeros(beyond_NS.shape, dtype=dtype).masked_fill_(beyond_NS, float("-inf"))
        self.mask_N11S = mask_NS[:, None, None]

    def attend(
        self, layer: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor, out_THE: Tensor
    ) -> None:
        kv = self.lane.kv[layer]
        key, value = kv[0], kv[1]
        key[self.rows_N, :, self.starts_N] = store(key_TKE[self.part], kv.dtype)
        value[self.rows_N, :, self.starts_N] = store(value_TKE[self.part], kv.dtype)
        count = len(self.rows_N)
        if self.dense:
            key, value = key[:count, :, : self.longest], value[:count, :, : self.longest]
        else:
            key, value = key[self.rows_N, :, : self.longest], value[self.rows_N, :, : self.longest]
        heads, size = key.shape[1], query_THE.shape[2]
        key, value = load(key, size, query_THE.dtype), load(value, size, query_THE.dtype)
        query_BRE = query_THE[self.part].reshape(count * heads, -1, size) * size**-0.5
        key_BSE, value_BSE = key.flatten(0, 1), value.flatten(0, 1)
        scores_BSR = torch.bmm(key_BSE, query_BRE.transpose(1, 2))  # faster than the transposed product
        scores_NKRS = scores_BSR.transpose(1, 2).view(count, heads, -1, self.longest) + self.mask_N11S
        shares_NKRS = torch.softmax(scores_NKRS, dim=-1, dtype=torch.float32).to(scores_BSR.dtype)
        mixed_BRE = torch.bmm(shares_NKRS.flatten(0, 1), value_BSE)
        out_THE[self.part] = mixed_BRE.view(count, -1, size)
