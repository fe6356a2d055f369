"""Sparse attention: each query sees the first tokens, those just before it, and the blocks of keys that may
matter most to it.

How much a block may matter is bounded from its lowest and highest key in every channel: no key of the block
scores more than ``sum(max(q * low, q * high))`` (Quest: Tang et al. 2024, arXiv 2406.10774). Bounds exist for
blocks and for families of :data:`FAMILY` blocks: the families with the highest bounds are opened, and only the
blocks in them are compared, so that the cost of choosing hardly grows with the context. Query heads that share
a key head choose together, as do the queries of a tile of a prompt: a block counts by the attention that they
would pay to it if each scored what it can at most, squared, so that what one of them needs most is not
outvoted.

Where few enough blocks exist, all of them are seen and attention is exact.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from lehr.engine.native.flash import chunk_attention, flash
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


class Choose(Protocol):
    """Chooses the blocks that tiles of a prompt see besides the first and the last ones."""

    def __call__(
        self, query_NKRE: Tensor, slot: Slot, layer: int, local_N: Tensor, sparse: SparseConfig
    ) -> Tensor:
        """Return ``[N, K, top_blocks]``. Of each tile, blocks from ``local_N`` on are seen anyway."""
        ...


def summarise(slot: Slot, layer: int, start: int, end: int, block: int) -> None:
    """Bring the bounds of a row in ``layer`` up to date after the keys of ``[start, end)`` were written."""
    first, last = min(start, slot.summarised) // block, end // block
    if first >= last:
        return
    fine, coarse = (bounds[layer, 0, slot.row] for bounds in slot.lane.bounds)
    key_KBSE = slot.lane.kv[layer, 0, slot.row, :, first * block : last * block].unflatten(1, (-1, block))
    number_B = torch.arange(first, last)
    family_F = torch.arange(first // FAMILY, -(-last // FAMILY))
    for side, extreme in enumerate((torch.amin, torch.amax)):
        fine[:, number_B // FAMILY, side, :, number_B % FAMILY] = extreme(key_KBSE, 2).transpose(0, 1)
        whole_KFEM = fine[:, family_F[0] : family_F[-1] + 1, side]
        found_KFE = extreme(whole_KFEM, 3)
        if last % FAMILY:
            found_KFE[:, -1] = extreme(whole_KFEM[:, -1, :, : last % FAMILY], 2)
        coarse[:, family_F // FAMILY, side, :, family_F % FAMILY] = found_KFE.transpose(0, 1)


def settle(spans: list[Span], block: int) -> None:
    """Take note that all layers have the bounds of the spans' blocks."""
    for span in spans:
        span.slot.summarised = (span.start + span.count) // block * block


def sparse_attention(
    query_LHE: Tensor, slot: Slot, layer: int, start: int, sparse: SparseConfig, choose: Choose | None = None
) -> Tensor:
    """Return the attention output ``[L, H, E]`` of positions from ``start`` on. Their keys, values and bounds
    are in the row already.
    """
    count = len(query_LHE)
    parts: list[Tensor] = []
    exact = min(count, max(0, sparse.exact_tokens - start))
    if exact:
        key, value = slot.lane.kv[layer, :, slot.row, :, : start + exact]
        parts.append(chunk_attention(query_LHE[:exact], key, value, start))
    done = exact
    while done < count:
        at = start + done
        length = min(TILE - at % TILE, count - done)
        tiles = min(_TILES, (count - done) // TILE) if length == TILE else 1
        part = query_LHE[done : done + tiles * length].unflatten(0, (tiles, length))
        parts.append(_tiles(part, slot, layer, at, sparse, choose or choose_blocks))
        done += tiles * length
    return torch.cat(parts)


def _tiles(
    query_NLHE: Tensor, slot: Slot, layer: int, start: int, sparse: SparseConfig, choose: Choose
) -> Tensor:
    """Return the attention output of neighbouring tiles of equal length, the first of which begins at
    ``start``: ``[N * L, H, E]``.
    """
    tiles, length, heads, size = query_NLHE.shape
    kv = slot.lane.kv[layer, :, slot.row]
    groups = kv.shape[1]
    query_NKRE = query_NLHE.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).reshape(tiles, groups, -1, size)
    local_N = (torch.arange(start, start + tiles * length, length) + 1 - sparse.window) // sparse.block
    chosen_NKC = choose(query_NKRE, slot, layer, local_N, sparse)
    sinks = torch.arange(sparse.sink_blocks).expand(tiles, groups, -1)
    before = start - int(local_N[0]) * sparse.block
    near = torch.arange(-(-(before + length) // sparse.block))
    near_NKC = (local_N[:, None, None] + near).expand(-1, groups, -1)
    seen_NKC = torch.cat((sinks, chosen_NKC, near_NKC), -1)
    far = (sparse.sink_blocks + sparse.top_blocks) * sparse.block
    mask = _mask(length, heads // groups, far, before, seen_NKC.shape[2] * sparse.block, query_NLHE.dtype)
    heads_K = torch.arange(groups)[:, None]
    blocks = kv[:, :, : kv.shape[2] // sparse.block * sparse.block].unflatten(2, (-1, sparse.block))
    key, value = (x[heads_K, seen_NKC].flatten(2, 3) for x in blocks)
    mixed_NKRE, _ = flash(query_NKRE, key, value, mask)
    return mixed_NKRE.reshape(tiles, heads, length, size).transpose(1, 2).reshape(-1, heads, size)


@functools.lru_cache(maxsize=4)
def _mask(length: int, share: int, far: int, before: int, keys: int, dtype: torch.dtype) -> Tensor:
    """Return ``[1, 1, share * length, keys]``: 0 for ``far`` keys and those up to a position, which has
    ``before`` ones and those of its tile before it, -inf for the rest.
    """
    mask = torch.full((length, keys), float("-inf"), dtype=dtype).triu_(far + before + 1)
    return mask.repeat(share, 1)[None, None]


def choose_blocks(query_NKRE: Tensor, slot: Slot, layer: int, local_N: Tensor, sparse: SparseConfig) -> Tensor:
    """Implements :class:`Choose` where there are no kernels."""
    fine, coarse = (bounds[layer, 0, slot.row] for bounds in slot.lane.bounds)
    families = (int(local_N[-1]) - 1) // FAMILY + 1
    opened = min(OPENED * sparse.top_blocks, families)
    signed_NKRC = torch.cat((query_NKRE.clamp(max=0), query_NKRE.clamp(min=0)), -1)
    coarse_KCF = coarse.flatten(2, 3).transpose(1, 2).flatten(2)[..., :families]
    fine_KFCM = fine.flatten(2, 3)
    heads_K = torch.arange(len(coarse))[:, None]
    parts: list[Tensor] = []
    rows = signed_NKRC.shape[1] * signed_NKRC.shape[2]
    step = max(1, _AT_ONCE // (rows * max(families, opened * FAMILY)))
    for some_NKRC, local in zip(signed_NKRC.split(step), local_N.split(step), strict=True):
        number_F = torch.arange(families)
        valid_NF = (number_F >= sparse.sink_blocks // FAMILY) & (number_F <= (local[:, None] - 1) // FAMILY)
        family_NKO = _best(some_NKRC, coarse_KCF[None], valid_NF[:, None], opened)
        number_NKB = (family_NKO[..., None] * FAMILY + torch.arange(FAMILY)).flatten(2)
        valid_NKB = (number_NKB >= sparse.sink_blocks) & (number_NKB < local[:, None, None])
        below_NKCB = fine_KFCM[heads_K, family_NKO].transpose(2, 3).flatten(3)
        best = _best(some_NKRC, below_NKCB, valid_NKB, sparse.top_blocks)
        parts.append(number_NKB.gather(-1, best))
    return torch.cat(parts)


def _best(signed_NKRC: Tensor, bounds_NKCB: Tensor, valid_NKB: Tensor, count: int) -> Tensor:
    """Return the indices of the ``count`` bounds that queries would pay the most attention to."""
    scores_NKRB = (signed_NKRC @ bounds_NKCB).masked_fill_(~valid_NKB[:, :, None], float("-inf"))
    shares_NKRB = (scores_NKRB.float() * (signed_NKRC.shape[-1] // 2) ** -0.5).softmax(-1)
    importance_NKB = shares_NKRB.square().sum(2).masked_fill_(~valid_NKB, -1.0)
    return importance_NKB.topk(count, sorted=False).indices
