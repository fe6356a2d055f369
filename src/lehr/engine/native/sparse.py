"""Sparse attention: each query sees the first tokens, those just before it, and the blocks of keys that may
matter most to it.

How much a block may matter is bounded from its lowest and highest key in every channel: no key of the block
scores more than ``sum(max(q * low, q * high))`` (Quest: Tang et al. 2024, arXiv 2406.10774). Bounds exist for
blocks and for families of :data:`FAMILY` blocks: the families with the highest bounds are opened, and only the
blocks in them are compared, so that the cost of choosing hardly grows with the context. Query heads that share
a key head choose together, as do the queries of a tile of a prompt: a block counts by how near its bound comes
to the best bound of any one of them.

Where few enough blocks exist, all of them are seen and attention is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lehr.engine.native.flash import chunk_attention, flash, merged
from lehr.engine.native.rows import FAMILY, Slot
from lehr.engine.native.settings import SparseConfig

if TYPE_CHECKING:
    from lehr.engine.native.attention import Span

TILE = 128
"""Queries of a prompt that choose together; tiles begin at its multiples."""
OPENED = 2
"""Families that are opened for each block that is chosen."""
_TILES, _AT_ONCE = 8, 1 << 24
"""Tiles and bounds computed at once."""


def summarise(slot: Slot, layer: int, start: int, end: int, block: int) -> None:
    """Bring the bounds of a row in ``layer`` up to date after the keys of ``[start, end)`` were written."""
    fine, coarse = (bounds[layer, 0, slot.row] for bounds in slot.lane.bounds)
    first, last = min(start, slot.summarised) // block, end // block
    if first >= last:
        return
    key_KBSE = slot.lane.kv[layer, 0, slot.row, :, first * block : last * block].unflatten(1, (-1, block))
    fine[:, first:last, 0] = key_KBSE.amin(2)
    fine[:, first:last, 1] = key_KBSE.amax(2)
    opened, closed = first // FAMILY, last // FAMILY
    whole_KFBE = fine[:, opened * FAMILY : closed * FAMILY].unflatten(1, (-1, FAMILY))
    coarse[:, opened:closed, 0] = whole_KFBE[:, :, :, 0].amin(2)
    coarse[:, opened:closed, 1] = whole_KFBE[:, :, :, 1].amax(2)
    if last % FAMILY:
        coarse[:, closed, 0] = fine[:, closed * FAMILY : last, 0].amin(1)
        coarse[:, closed, 1] = fine[:, closed * FAMILY : last, 1].amax(1)


def settle(spans: list[Span], block: int) -> None:
    """Take note that all layers have the bounds of the spans' blocks."""
    for span in spans:
        span.slot.summarised = (span.start + span.count) // block * block


def sparse_attention(query_LHE: Tensor, slot: Slot, layer: int, start: int, sparse: SparseConfig) -> Tensor:
    """Return the attention output ``[L, H, E]`` of positions from ``start`` on. Their keys, values and bounds
    are in the row already.
    """
    count = len(query_LHE)
    kv = slot.lane.kv[layer, :, slot.row]
    parts: list[Tensor] = []
    exact = min(count, max(0, sparse.exact_tokens - start))
    if exact:
        key, value = kv[:, :, : start + exact]
        parts.append(chunk_attention(query_LHE[:exact], key, value, start))
    done = exact
    while done < count:
        at = start + done
        length = min(TILE - at % TILE, count - done)
        tiles = min(_TILES, (count - done) // TILE) if length == TILE else 1
        part = query_LHE[done : done + tiles * length].unflatten(0, (tiles, length))
        parts.append(_tiles(part, slot, layer, at, sparse))
        done += tiles * length
    return torch.cat(parts)


def _tiles(query_NLHE: Tensor, slot: Slot, layer: int, start: int, sparse: SparseConfig) -> Tensor:
    """Return the attention output of neighbouring tiles of equal length, the first of which begins at
    ``start``: ``[N * L, H, E]``.
    """
    tiles, length, heads, size = query_NLHE.shape
    kv = slot.lane.kv[layer, :, slot.row]
    groups = kv.shape[1]
    query_NKRE = query_NLHE.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).reshape(tiles, groups, -1, size)
    starts = torch.arange(start, start + tiles * length, length)
    local_N = (starts + 1 - sparse.window) // sparse.block
    chosen_NKC = _choose(query_NKRE, slot, layer, local_N, sparse)
    sinks = torch.arange(sparse.sink_blocks).expand(tiles, groups, -1)
    seen_NKC = torch.cat((sinks, chosen_NKC), -1)
    blocks = kv[:, :, : kv.shape[2] // sparse.block * sparse.block].unflatten(2, (-1, sparse.block))
    heads_K = torch.arange(groups)[:, None]
    far_key, far_value = (x[heads_K, seen_NKC].flatten(2, 3) for x in blocks)
    first = int(local_N[0]) * sparse.block
    before = start - first
    near_key, near_value = (
        x[:, first:].unfold(1, before + length, length)[:, :tiles].permute(1, 0, 3, 2).contiguous() for x in kv
    )
    share = heads // groups
    mask = torch.full((length, before + length), float("-inf"), dtype=query_NLHE.dtype).triu_(before + 1)
    own = flash(query_NKRE, near_key, near_value, mask.repeat(share, 1)[None, None])
    mixed_NKRE = merged(flash(query_NKRE, far_key, far_value), own)
    return mixed_NKRE.view(tiles, heads, length, size).transpose(1, 2).reshape(-1, heads, size)


def _choose(query_NKRE: Tensor, slot: Slot, layer: int, local_N: Tensor, sparse: SparseConfig) -> Tensor:
    """Return the blocks that each tile and group of heads sees besides sinks and ``local_N`` onwards,
    ``[N, K, top_blocks]``.
    """
    fine, coarse = (bounds[layer, 0, slot.row] for bounds in slot.lane.bounds)
    families = (int(local_N[-1]) - 1) // FAMILY + 1
    opened = min(OPENED * sparse.top_blocks, families)
    signed_NKRC = torch.cat((query_NKRE.clamp(max=0), query_NKRE.clamp(min=0)), -1)
    bounds_KFC = coarse[:, :families].flatten(2)
    fine_KFC = fine[:, : families * FAMILY].unflatten(1, (-1, FAMILY)).flatten(2)
    heads_K = torch.arange(len(coarse))[:, None]
    parts: list[Tensor] = []
    rows = signed_NKRC.shape[1] * signed_NKRC.shape[2]
    step = max(1, _AT_ONCE // (rows * max(families, opened * FAMILY)))
    for some_NKRC, local in zip(signed_NKRC.split(step), local_N.split(step), strict=True):
        number_F = torch.arange(families)
        valid_NF = (number_F >= sparse.sink_blocks // FAMILY) & (number_F <= (local[:, None] - 1) // FAMILY)
        family_NKO = _best(some_NKRC, bounds_KFC[None], valid_NF[:, None], opened)
        number_NKB = (family_NKO[..., None] * FAMILY + torch.arange(FAMILY)).flatten(2)
        valid_NKB = (number_NKB >= sparse.sink_blocks) & (number_NKB < local[:, None, None])
        below = fine_KFC[heads_K, family_NKO].unflatten(-1, (FAMILY, -1)).flatten(2, 3)
        best = _best(some_NKRC, below, valid_NKB, sparse.top_blocks)
        parts.append(number_NKB.gather(-1, best))
    return torch.cat(parts)


def _best(signed_NKRC: Tensor, bounds_NKBC: Tensor, valid_NKB: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` bounds that come nearest to the best of some query."""
    scores_NKRB = (signed_NKRC @ bounds_NKBC.transpose(-1, -2)).masked_fill_(
        ~valid_NKB[:, :, None], float("-inf")
    )
    return (scores_NKRB - scores_NKRB.amax(-1, keepdim=True)).amax(2).topk(count, sorted=False).indices
