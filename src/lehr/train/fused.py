"""What stands between the matrix products of a layer as compiled functions, with their gradients."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from lehr.engine.native.kernels.load import Kernels, kernels_for
from lehr.model.decoder import PLAIN, Plain, RMSNorm


class Fused(Plain):
    """As :class:`lehr.model.decoder.Plain`, one pass over the rows each. Sums are float32."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def norm(self, x_TD: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """See :meth:`lehr.model.decoder.Plain.norm`."""
        return _Norm.apply(x_TD, norm.weight, norm.eps, self.kernels)

    def gated(self, gate_up_TI: Tensor) -> Tensor:
        """See :meth:`lehr.model.decoder.Plain.gated`."""
        return _Gated.apply(gate_up_TI, self.kernels)


@functools.cache
def between_products(dtype: torch.dtype) -> Plain:
    """Return the compiled functions for a dtype, or torch's where there are none."""
    kernels = kernels_for(dtype)
    return Fused(kernels) if kernels is not None else PLAIN


class _Norm(torch.autograd.Function):
    """Gives the stream through beside its norm, so that backwards both gradients are added in the same pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, kernels: Kernels) -> tuple[Tensor, Tensor]:
        x = x.contiguous()
        out = torch.empty_like(x)
        kernels.norm(x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), *x.shape, eps)
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.kernels = eps, kernels
        return x.view_as(x), out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        residual, grad = (g.contiguous() for g in grads)
        flow, grad_weight = torch.empty_like(x), torch.zeros(weight.shape, dtype=torch.float32)
        ctx.kernels.norm_back(
            x.data_ptr(), weight.data_ptr(), grad.data_ptr(), residual.data_ptr(), flow.data_ptr(),
            grad_weight.data_ptr(), *x.shape, ctx.eps,
        )  # fmt: skip
        return flow, grad_weight.to(weight.dtype), None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, kernels: Kernels) -> Tensor:
        gate_up = gate_up.contiguous()
        rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, inner)
        kernels.gated(gate_up.data_ptr(), out.data_ptr(), rows, inner)
        ctx.save_for_backward(gate_up)
        ctx.kernels = kernels
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        grad, flow = grads[0].contiguous(), torch.empty_like(gate_up)
        ctx.kernels.gated_back(gate_up.data_ptr(), grad.data_ptr(), flow.data_ptr(), *grad.shape)
        return flow, None
