"""The loss of a critic."""

from __future__ import annotations

import torch
from torch import Tensor


def value_loss(values_T: Tensor, old_T: Tensor, returns_T: Tensor, clip: float | None = None) -> Tensor:
    """Return ``(V - R)^2 / 2`` of each token; with ``clip`` the larger of that and of the same with ``V`` held
    within ``clip`` of the value that the advantages were computed from: a token that has moved so far towards
    its return gets no more gradient (Schulman et al. 2017 as implemented in OpenAI's baselines, ``ppo2``).
    """
    plain = (values_T - returns_T).square()
    if clip is None:
        return plain / 2
    held = old_T + (values_T - old_T).clamp(-clip, clip)
    return torch.maximum(plain, (held - returns_T).square()) / 2
