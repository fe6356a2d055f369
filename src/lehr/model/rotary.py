"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) in the half-split layout of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lehr.model.scaling import Rope


class Rotary:
    """The angles of one model. They depend on nothing but the position, except under ``dynamic`` scaling beyond
    the trained length, where they also depend on the length of the whole sequence.
    """

    def __init__(self, rope: Rope, head_size: int) -> None:
        self.rope, self._head_size = rope, head_size
        self._plain = inverse_frequencies(rope, head_size)
        self._scale = attention_factor(rope)

    def depends_on(self, length: int) -> bool:
        """Whether the angles of a sequence of ``length`` differ from those of a shorter one."""
        return self.rope.type == "dynamic" and length > self.rope.original_max_position_embeddings

    def angles(
        self, positions_T: Tensor, dtype: torch.dtype, lengths_T: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return cosine and sine, each ``[T, 1, head_size / 2]``, computed in float32, times what the scaling
        multiplies queries and keys by.

        lengths_T: of the whole sequence of each position; without it all are of one, which ends at the highest
        position.
        """
        inverse = self._plain
        if self.rope.type == "dynamic" and len(positions_T):
            each = lengths_T or [int(positions_T.max()) + 1]
            if any(map(self.depends_on, each)):
                known = {n: inverse_frequencies(self.rope, self._head_size, n) for n in set(each)}
                inverse = torch.stack([known[n] for n in each])[:, None]
        phase = positions_T.to(torch.float32)[:, None, None] * inverse
        return (phase.cos() * self._scale).to(dtype), (phase.sin() * self._scale).to(dtype)


def attention_factor(rope: Rope) -> float:
    """Return what queries and keys are multiplied by (Peng et al. 2023, section 3.4); 1 but for ``yarn``."""
    if rope.type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def share(mscale: float) -> float:
        return 0.1 * mscale * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return share(rope.mscale) / share(rope.mscale_all_dim)
    return share(1.0)


def inverse_frequencies(rope: Rope, head_size: int, length: int = 0) -> Tensor:
    """Return float32 ``[head_size / 2]``, the angle per position of each pair. ``length``: of the sequence,
    which ``dynamic`` scaling depends on.
    """
    exponents = torch.arange(0, head_size, 2, dtype=torch.int64, device="cpu").float() / head_size
    original = rope.original_max_position_embeddings
    if rope.type == "dynamic":
        stretch = rope.factor * max(length, original) / original - (rope.factor - 1)
        return 1.0 / ((rope.theta * stretch ** (head_size / (head_size - 2))) ** exponents)
    plain = 1.0 / (rope.theta**exponents)
    if rope.type == "default":
        return plain
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "yarn":
        return _yarn(rope, head_size, plain)
    wavelength = 2 * math.pi / plain
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    slow, fast = wavelength > original / low, wavelength < original / high
    return torch.where(slow, plain / rope.factor, torch.where(fast, plain, blended))


def _yarn(rope: Rope, head_size: int, plain: Tensor) -> Tensor:
    """Return frequencies by parts (Peng et al. 2023, section 3.2): the fast ones stay, the slow ones are
    divided by the factor, a linear ramp over the pairs lies between.
    """

    def pair(turns: float) -> float:
        share = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_size * math.log(share) / (2 * math.log(rope.theta))

    first, last = pair(rope.beta_fast or 32), pair(rope.beta_slow or 1)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_size - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(head_size // 2, dtype=torch.float32, device="cpu")
    ramp = ((pairs - first) / (last - first)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)


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
