"""Weights laid out once for the processor's matrix kernels: for ours (``panels``) or for oneDNN's.

Packed modules replace ``nn.Linear`` in the engine's own decoder; they hold no plain weight, so a packed decoder
can sample and cannot be trained or saved.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lehr.engine.native.kernels.load import Kernels
from lehr.engine.native.panels import Arena, PanelLinear, can_use_panels
from lehr.model.decoder import Decoder

PROJECTIONS = ("qkv", "o", "gate_up", "down")
"""The linear layers of a decoder's block, by name."""
_TYPICAL_ROWS = 64


class PackedLinear(nn.Module):
    """A linear layer on a oneDNN weight. Input ``[N, in]``."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        weight = plain.weight.detach()
        self.outputs = len(weight)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self.bias = None if plain.bias is None else plain.bias.detach()

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        return torch.ops.mkldnn._linear_pointwise(x_ND, self.packed, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this build and processor have packed kernels for ``dtype``."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed(plain: nn.Linear, kernels: Kernels | None, arena: Arena) -> nn.Module:
    """Return the layer on the layout that is fastest here; ``plain`` itself where there is no better one."""
    if kernels is not None and can_use_panels(plain.weight, kernels):
        return PanelLinear(plain, kernels, arena)
    return PackedLinear(plain) if can_pack(plain.weight.dtype) else plain


def pack(decoder: Decoder, kernels: Kernels | None = None) -> Decoder:
    """Replace every projection of ``decoder`` that is plain by a packed one, in place, and return it."""
    arena = Arena()
    for layer in decoder.layers:
        for name in PROJECTIONS:
            plain = layer.get_submodule(name)
            if isinstance(plain, nn.Linear):
                setattr(layer, name, packed(plain, kernels, arena))
    if isinstance(decoder.head, nn.Linear):  # pyright: ignore[reportUnnecessaryIsInstance]
        decoder.head = packed(decoder.head, kernels, arena)  # pyright: ignore[reportAttributeAccessIssue]
    return decoder
