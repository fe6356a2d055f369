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
    """A linear layer on a oneDNN weight. Input ``[N, in]``. dtype: of the weight here and of the output; unless
    given that of the plain one.
    """

    def __init__(self, plain: nn.Linear, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._dtype = dtype or plain.weight.dtype
        weight = plain.weight.detach().to(self._dtype)
        self.outputs = len(weight)
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self.bias = None if plain.bias is None else plain.bias.detach().to(self._dtype)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        return torch.ops.mkldnn._linear_pointwise(x_ND.to(self._dtype), self.packed, self.bias, "none", [], "")


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this build and processor have packed kernels for ``dtype``."""
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype is torch.float32 or (dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def packed(plain: nn.Linear, kernels: Kernels | None, arena: Arena) -> nn.Module:
    """Return the layer on the layout that is fastest here; ``plain`` itself where there is no better one."""
    if kernels is not None and kernels.panels_pay and can_use_panels(plain.weight):
        return PanelLinear(plain, kernels, arena)
    return PackedLinear(plain) if can_pack(plain.weight.dtype) else plain


def packed_head(plain: nn.Linear, kernels: Kernels | None, arena: Arena) -> nn.Module:
    """Return the vocabulary head on a layout from which it gives float32: see :class:`lehr.model.decoder.Head`.

    oneDNN rounds to the dtype of its inputs. Without kernels the weight is kept in float32.
    """
    if plain.weight.dtype is torch.float32:
        return packed(plain, kernels, arena)
    if kernels is not None and can_use_panels(plain.weight):
        return PanelLinear(plain, kernels, arena, float32_out=True)
    if not can_pack(torch.float32):
        return plain
    return PackedLinear(plain, torch.float32)


def pack(decoder: Decoder, kernels: Kernels | None = None) -> Decoder:
    """Replace every projection of ``decoder`` that is plain by a packed one, in place, and return it."""
    arena = Arena()
    for layer in decoder.layers:
        for name in PROJECTIONS:
            plain = layer.get_submodule(name)
            if isinstance(plain, nn.Linear):
                setattr(layer, name, packed(plain, kernels, arena))
    if isinstance(decoder.head, nn.Linear):  # pyright: ignore[reportUnnecessaryIsInstance]
        decoder.head = packed_head(decoder.head, kernels, arena)  # pyright: ignore[reportAttributeAccessIssue]
    return decoder
