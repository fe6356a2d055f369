"""Weights of one byte an element, for steps of few rows.

Such a step takes as long as reading the weights, so that half the bytes are nearly half the time. Every output
has a scale of its own (symmetric, the largest weight becomes 127); inputs are not rounded. Steps of many rows
take as long as their multiplications: for them the same rounded weights are kept in the engine's dtype as well,
so that a prompt and what follows it are computed with the same numbers, for half as much memory again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lehr.core.errors import ConfigError
from lehr.engine.native.kernels.build import INSTALL, why_not
from lehr.engine.native.kernels.load import Kernels, kernels_for
from lehr.engine.native.packing import PROJECTIONS, packed, packed_head
from lehr.engine.native.panels import Arena
from lehr.model.decoder import Decoder

FEW = 16
"""Rows up to which the weights are read as bytes."""
_PANEL = 64


class Int8Linear(nn.Module):
    """A linear layer on rounded weights. Input ``[N, in]``, output of the input's dtype, or float32."""

    def __init__(
        self, plain: nn.Linear, kernels: Kernels, arena: Arena | None = None, *, float32_out: bool = False
    ) -> None:
        super().__init__()
        self._run = kernels.int8_rows_wide if float32_out else kernels.int8_rows
        weight = plain.weight.detach()
        rounded, self.scales = quantized(weight)
        self.outputs, self.inputs = weight.shape
        self.bias = None if plain.bias is None else plain.bias.detach()
        self.panels = in_panels(rounded)
        back = nn.Linear(self.inputs, self.outputs, bias=self.bias is not None, device="meta")
        back.weight = nn.Parameter((rounded * self.scales[:, None]).to(weight.dtype), requires_grad=False)
        back.bias = plain.bias
        self._out = torch.float32 if float32_out else weight.dtype
        self.wide = (packed_head if float32_out else packed)(back, kernels, arena or Arena())

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias``."""
        rows = len(x_ND)
        if rows > FEW:
            return self.wide(x_ND)
        x_ND = x_ND.contiguous()
        out = x_ND.new_empty(rows, self.outputs, dtype=self._out)
        self._run(
            x_ND.data_ptr(), self.panels.data_ptr(), self.scales.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(), out.data_ptr(),
            rows, self.inputs, self.outputs,
        )  # fmt: skip
        return out


def round_weights(decoder: Decoder) -> Decoder:
    """Replace every projection of ``decoder`` by one on rounded weights, in place, and return it.

    Raises :class:`ConfigError` where there are no compiled kernels, without which nothing would be gained.
    """
    kernels = kernels_for(decoder.embed.weight.dtype)
    if kernels is None:
        raise ConfigError(f"weights of type int8 need compiled kernels: {why_not()}", hint=f"{INSTALL}.")
    arena = Arena()
    for layer in decoder.layers:
        for name in PROJECTIONS:
            plain = layer.get_submodule(name)
            if isinstance(plain, nn.Linear):
                setattr(layer, name, Int8Linear(plain, kernels, arena))
    if isinstance(decoder.head, nn.Linear):  # pyright: ignore[reportUnnecessaryIsInstance]
        head = Int8Linear(decoder.head, kernels, arena, float32_out=True)
        decoder.head = head  # pyright: ignore[reportAttributeAccessIssue]
    return decoder


def quantized(weight_OI: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 ``[O, I]`` and float32 scales ``[O]`` with ``int8 * scale`` near ``weight``."""
    wide = weight_OI.float()
    scales = (wide.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (wide / scales[:, None]).round().clamp(-127, 127).to(torch.int8), scales


def in_panels(rounded_OI: Tensor) -> Tensor:
    """Return int8 ``[O / 64, I, 64]``, the layout of ``int8.cpp``; outputs beyond the last are 0."""
    outputs, inputs = rounded_OI.shape
    panels = -(-outputs // _PANEL)
    padded = rounded_OI.new_zeros(panels * _PANEL, inputs)
    padded[:outputs] = rounded_OI
    return padded.view(panels, _PANEL, inputs).transpose(1, 2).contiguous()
