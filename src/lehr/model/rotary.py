"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) in the half-split layout of Hugging Face."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lehr.model.config import Rope


def inverse_frequencies(rope: Rope, head_size: int) -> Tensor:
    """Return float32 ``[head_size / 2]``, the angle per position of each pair."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64, device="cpu").float() / head_size
    plain = 1.0 / (rope.theta**exponents)
    if rope.type == "default":
        return plain
    if rope.type == "linear":
        return plain / rope.factor
    wavelength = 2 * math.pi / plain
    original = rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    slow, fast = wavelength > original / low, wavelength < original / high
    return torch.where(slow, plain / rope.factor, torch.where(fast, plain, blended))


def angles(inverse: Tensor, positions_T: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, each ``[T, 1, head_size / 2]``, computed in float32."""
    phase = positions_T.to(torch.float32)[:, None, None] * inverse
    return phase.cos().to(dtype), phase.sin().to(dtype)


def rotate(heads_THE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return every head turned by the angle of its position. The result is contiguous."""
    if torch.is_grad_enabled() and heads_THE.requires_grad:
        return _Rotate.apply(heads_THE, cos, sin)
    return _turn(heads_THE, cos, sin)


def _turn(heads_THE: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> Tensor:
    first, second = heads_THE.chunk(2, dim=-1)
    turned = torch.empty(heads_THE.shape, dtype=heads_THE.dtype, device=heads_THE.device)
    low, high = turned.chunk(2, dim=-1)
    sign = 1 if back else -1
    torch.mul(first, cos, out=low).addcmul_(second, sin, value=sign)
    torch.mul(second, cos, out=high).addcmul_(first, sin, value=-sign)
    return turned


class _Rotate(torch.autograd.Function):
    """A rotation's gradient is the rotation back; nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, heads_THE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(heads_THE, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, sin, back=True), None, None
