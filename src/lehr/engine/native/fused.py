"""The decoder's forward pass over working rows, with everything between two matrix products in one kernel.

The same numbers as ``Decoder.hidden`` with :class:`~lehr.engine.native.attention.StepAttention`, which is
what runs where there are no kernels: sums in float32, results rounded at the same places.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lehr.engine.native.attention import Span, lengths
from lehr.engine.native.flash import chunk_attention
from lehr.engine.native.invariant import tile_rows
from lehr.engine.native.kernels.load import Kernels
from lehr.engine.native.rows import LONG, Slot
from lehr.engine.native.settings import SparseConfig
from lehr.engine.native.sparse import sparse_attention, summarise
from lehr.model.decoder import Decoder, Layer

SHORT, FEW = 256, 16
"""Positions and new tokens up to which each new token of a chunk goes over all keys by itself, rather than all
of them as one product."""


def short(start: int, count: int) -> bool:
    """Whether a span's attention is left to the kernel."""
    return count <= FEW or start + count <= SHORT


class FusedForward:
    """Runs one decoder. Weights are used where they lie; ``decoder`` must stay alive and unchanged.

    invariant: whether every token goes over its keys by itself, in the order of their positions, whatever it is
    computed with.

    attention_s: seconds spent in attention so far, the choosing of keys included.
    choosing_s: the part of it that went into choosing keys for prompts.
    """

    def __init__(
        self,
        decoder: Decoder,
        kernels: Kernels,
        sparse: SparseConfig | None = None,
        *,
        invariant: bool = False,
    ) -> None:
        self._decoder = decoder
        self._kernels = kernels
        self._sparse, self._tile = sparse, tile_rows(decoder.embed.weight.dtype) if invariant else 0
        self.attention_s = self.choosing_s = 0.0
        self._layers = [_Weights(layer) for layer in decoder.blocks()]

    def hidden(self, tokens: Sequence[int], spans: Sequence[Span]) -> Tensor:
        """Return the hidden states after the final norm, ``[T, D]``. ``spans`` cover the tokens in order, those
        that are :func:`short` first.
        """
        decoder, kernels, config = self._decoder, self._kernels, self._decoder.config
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        count, eps = len(tokens), config.norm_eps
        x = decoder.embed(torch.tensor(tokens))
        positions = np.concatenate([np.arange(s.start, s.start + s.count) for s in spans])
        cos, sin = decoder.rotary.angles(torch.from_numpy(positions), x.dtype, lengths(spans))
        places = np.repeat(np.array([_place(s) for s in spans], np.int64), [s.count for s in spans], axis=0)
        chunks = [s for s in spans if not (self._tile or short(s.start, s.count))]
        directly = count - sum(s.count for s in chunks)
        at, where = places.ctypes.data, positions.ctypes.data
        room = count + (-count % self._tile if self._tile else 0)
        normed, inner, mixed = (
            (x.new_zeros if room > count else x.new_empty)(room, width)
            for width in (config.hidden_size, config.intermediate_size, heads * size)
        )
        query = x.new_empty(count, heads, size)
        x_at, normed_at, query_at, mixed_at = (t.data_ptr() for t in (x, normed, query, mixed))
        cos_at, sin_at, inner_at = cos.data_ptr(), sin.data_ptr(), inner.data_ptr()
        int8 = spans[0].slot.lane.kv.dtype is torch.int8
        rotate = kernels.rotate_int8 if int8 else kernels.rotate
        alone = (kernels.attend_alone_int8 if int8 else kernels.attend_alone) if self._tile else None
        sparse = self._sparse
        block = sparse.block if sparse else 0
        closing = [s for s in spans if block and _closes(s, block)]
        bounds = np.repeat(
            np.array([_bounds(s.slot) for s in spans if block], np.int64).reshape(-1, 6),
            [s.count for s in spans if block],
            axis=0,
        )

        def attend(layer: int) -> None:
            """Attend for the first ``directly`` tokens."""
            shape = (layer, directly, heads, kv_heads, size)
            if sparse is not None:
                chosen = (sparse.sink_blocks, sparse.window, sparse.top_blocks, sparse.block)
                kernels.attend_sparse(query_at, mixed_at, at, bounds.ctypes.data, where, *shape, *chosen)
            elif alone:
                alone(query_at, mixed_at, at, where, *shape)
            elif int8:
                kernels.attend_int8(query_at, mixed_at, at, where, *shape)
            elif longest > LONG:
                kernels.attend_split(query_at, mixed_at, at, where, *shape)
            else:
                kernels.attend(query_at, mixed_at, at, where, *shape)

        longest = int(positions[:directly].max(initial=0))
        added: Tensor | None = None  # what the layer before adds to the residual stream
        for number, layer in enumerate(self._layers):
            kernels.norm(
                x_at,
                None if added is None else added.data_ptr(),
                layer.attn_norm,
                normed_at,
                count,
                config.hidden_size,
                eps,
            )
            qkv = layer.qkv(normed)
            rotate(
                qkv.data_ptr(), cos_at, sin_at, layer.q_norm, layer.k_norm, query_at, at, where, number,
                count, heads, kv_heads, size, eps,
            )  # fmt: skip
            begun = time.perf_counter()
            for span in closing:
                summarise(span.slot, number, span.start, span.start + span.count, block)
            if directly:
                attend(number)
            for span in chunks:
                part = slice(span.offset, span.offset + span.count)
                kv = span.slot.lane.kv[number, :, span.slot.row, :, : span.start + span.count]
                if sparse is None:
                    kv = self._widened(kv)
                    mixed[part] = chunk_attention(query[part], kv[0], kv[1], span.start).flatten(1)
                else:
                    mixed[part] = sparse_attention(
                        query[part], span.slot, number, span.start, sparse, self._choose
                    ).flatten(1)
            self.attention_s += time.perf_counter() - begun
            projected: Tensor = layer.o(mixed)
            kernels.norm(x_at, projected.data_ptr(), layer.mlp_norm, normed_at, count, config.hidden_size, eps)
            gate_up: Tensor = layer.gate_up(normed)
            kernels.gated(gate_up.data_ptr(), inner_at, count, config.intermediate_size)
            added = layer.down(inner)
        kernels.norm(
            x_at,
            None if added is None else added.data_ptr(),
            decoder.norm.weight.data_ptr(),
            normed_at,
            count,
            config.hidden_size,
            eps,
        )
        return normed[:count]

    def _widened(self, kv: Tensor) -> Tensor:
        """Return keys and values, ``[2, K, S, E]``, of one layer and row, in the compute dtype."""
        if kv.dtype is not torch.int8:
            return kv
        config = self._decoder.config
        _, heads, count, _ = kv.shape
        wide = torch.empty(2, heads, count, config.head_size, dtype=self._decoder.embed.weight.dtype)
        value, head, _, _ = kv.stride()
        self._kernels.widen_int8(kv.data_ptr(), wide.data_ptr(), value, head, heads, count, config.head_size)
        return wide

    def _choose(
        self, query_NKRE: Tensor, slot: Slot, layer: int, local_N: Tensor, sparse: SparseConfig
    ) -> Tensor:
        begun = time.perf_counter()
        tiles, groups, rows, size = query_NKRE.shape
        chosen_NKC = torch.empty(tiles, groups, sparse.top_blocks, dtype=torch.int64)
        bounds = np.array(_bounds(slot), np.int64)
        self._kernels.choose(
            query_NKRE.data_ptr(), bounds.ctypes.data, local_N.data_ptr(), chosen_NKC.data_ptr(), layer, tiles,
            groups, rows, size, sparse.sink_blocks, sparse.top_blocks,
        )  # fmt: skip
        self.choosing_s += time.perf_counter() - begun
        return chosen_NKC


class _Weights:
    """One layer's projections, and the addresses of its norms."""

    def __init__(self, layer: Layer) -> None:
        self.qkv, self.o, self.gate_up, self.down = layer.qkv, layer.o, layer.gate_up, layer.down
        self.attn_norm = layer.attn_norm.weight.data_ptr()
        self.mlp_norm = layer.mlp_norm.weight.data_ptr()
        self.q_norm = None if layer.q_norm is None else layer.q_norm.weight.data_ptr()
        self.k_norm = None if layer.k_norm is None else layer.k_norm.weight.data_ptr()


def _closes(span: Span, block: int) -> bool:
    """Whether the span completes a block, or follows some that have no bounds yet."""
    return min(span.start, span.slot.summarised) // block < (span.start + span.count) // block


def _bounds(slot: Slot) -> tuple[int, ...]:
    """Return ``kernels/sparse.cpp``'s ``Bounds`` of a row."""
    found: list[int] = []
    for bounds in slot.lane.bounds:
        layer, _, row, head, *_ = bounds.stride()
        found += [bounds.data_ptr() + slot.row * row * bounds.element_size(), layer, head]
    return tuple(found)


def _place(span: Span) -> tuple[int, int, int, int]:
    """Return ``kernels/shared.h``'s ``Place`` of a span's row."""
    kv = span.slot.lane.kv
    layer, value, row, head, _, _ = kv.stride()
    return kv.data_ptr() + span.slot.row * row * kv.element_size(), layer, value, head
