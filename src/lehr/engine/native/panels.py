"""Weights laid out for our own product of rows: see ``kernels/panels.cpp``.

On two AVX2 cores steps of 8 to 32 rows take two thirds of the time that oneDNN takes in float32, and a prompt a
little less. There torch has no packed product in bfloat16 at all; from panels it takes as long as float32 does,
half as long for a single row. On processors with wider registers oneDNN's layouts are used.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor, nn

from lehr.engine.native.kernels.load import Kernels

ARENA = 64 << 20
_LINE = 64


class Arena:
    """Memory for weights, side by side on large pages: fewer addresses to look up while they are read through.
    It is given back when the last tensor is gone.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._used = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return zeros that begin at a cache line."""
        count = math.prod(shape)
        size = count * dtype.itemsize
        if self._memory is None or self._used + size > len(self._memory):
            self._memory = mmap.mmap(-1, max(ARENA, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with suppress(OSError):  # this kernel has none
                    self._memory.madvise(mmap.MADV_HUGEPAGE)
            self._used = 0
        found = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=self._used).view(shape)
        self._used += -(-size // _LINE) * _LINE
        return found


class PanelLinear(nn.Module):
    """A linear layer on a weight in panels. Input ``[N, in]``; a row's result does not depend on the others.
    float32_out: sums are given as they are, not rounded to the input's dtype.
    """

    def __init__(self, plain: nn.Linear, kernels: Kernels, arena: Arena, *, float32_out: bool = False) -> None:
        super().__init__()
        weight = plain.weight.detach()
        self.outputs, self.inputs = weight.shape
        self.bias = None if plain.bias is None else plain.bias.detach()
        self._run = kernels.panels_wide if float32_out else kernels.panels
        self._out = torch.float32 if float32_out else weight.dtype
        self._bias_at = None if self.bias is None else self.bias.data_ptr()
        self.panels = in_panels(weight, kernels.panel_outputs, arena)
        self._panels_at = self.panels.data_ptr()

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        x_ND = x_ND.contiguous()
        rows = len(x_ND)
        out_NO = x_ND.new_empty(rows, self.outputs, dtype=self._out)
        self._run(
            x_ND.data_ptr(), self._panels_at, self._bias_at, out_NO.data_ptr(), rows, self.inputs, self.outputs
        )
        return out_NO


def can_use_panels(weight: Tensor) -> bool:
    """Return whether panels can hold a weight."""
    return weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and weight.shape[1] % 2 == 0)


def in_panels(weight_OI: Tensor, width: int, arena: Arena) -> Tensor:
    """Return the weight as float32 ``[O / width, I, width]`` or bfloat16 ``[O / width, I / 2, width, 2]``;
    outputs beyond the last are 0.
    """
    outputs, inputs = weight_OI.shape
    count = -(-outputs // width)
    together = 4 // weight_OI.element_size()
    panels = arena.zeros((count, inputs // together, width, together), weight_OI.dtype)
    whole = outputs // width
    pairs = weight_OI.unflatten(1, (-1, together))
    panels[:whole] = pairs[: whole * width].unflatten(0, (-1, width)).transpose(1, 2)
    if whole < count:
        panels[whole, :, : outputs - whole * width] = pairs[whole * width :].transpose(0, 1)
    return panels
