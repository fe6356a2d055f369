"""Attention in memory that does not grow with the context: tile by tile, with a running softmax (Dao et al.
2022, arXiv 2205.14135). Parts of a context are merged by their log-sum-exp.
"""

from __future__ import annotations

import torch
from torch import Tensor


def chunk_attention(query_LHE: Tensor, key_KSE: Tensor, value_KSE: Tensor, start: int) -> Tensor:
    """Return the attention output ``[L, H, E]`` of the positions from ``start`` on over the ``S = start + L``
    keys up to their own.

    What comes before the chunk is seen by all of it, so needs no mask.
    """
    length, heads, size = query_LHE.shape
    groups = key_KSE.shape[0]
    query_HLE = query_LHE.transpose(0, 1).contiguous()
    own = tuple(
        kv[:, None, start:].expand(-1, heads // groups, -1, -1).flatten(0, 1) for kv in (key_KSE, value_KSE)
    )
    mixed_HLE, lse_HL = flash(query_HLE[None], own[0][None], own[1][None], causal=True)
    if start:
        query_KRE = query_HLE.view(1, groups, -1, size)
        past = flash(query_KRE, key_KSE[None, :, :start], value_KSE[None, :, :start])
        shape = mixed_HLE.shape
        mixed_HLE = merged((past[0].reshape(shape), past[1].reshape(shape[:-1])), (mixed_HLE, lse_HL))
    return mixed_HLE.reshape(heads, length, size).transpose(0, 1)


def flash(
    query_NHRE: Tensor,
    key_NHSE: Tensor,
    value_NHSE: Tensor,
    mask: Tensor | None = None,
    *,
    causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return attention ``[N, H, R, E]`` and float32 log-sum-exp ``[N, H, R]`` of scores, in tiles."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query_NHRE, key_NHSE, value_NHSE, 0.0, causal, attn_mask=mask
    )


def merged(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> Tensor:
    """Return the attention over the keys of both, which have none in common."""
    both = torch.logaddexp(first[1], second[1])
    one, other = (mixed.float() * (lse - both).exp_()[..., None] for mixed, lse in (first, second))
    return (one + other).to(first[0].dtype)
