"""Estimates of KL(pi || ref) from sampled tokens (Schulman 2020, "Approximating KL divergence").

With x = log(pi / ref), at tokens drawn from pi, the expectation of each is the divergence, exactly for k1 and
k3.
As a loss, only the gradient of k2 is in expectation that of the divergence: the mean gradient of k1 is 0, that
of k3 is the other direction's, KL(ref || pi) (Tang & Munos 2025, arXiv 2506.09477). Hence k1 in the reward, k2
in the loss, k3, which is never negative, as a metric.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lehr.train.losses.base import log_ratio


def k1(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """Return ``x``, ``[T]``."""
    return logprobs_T - reference_T


def k2(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """Return ``x^2 / 2``, ``[T]``."""
    return 0.5 * (logprobs_T - reference_T).square()


def k3(logprobs_T: Tensor, reference_T: Tensor) -> Tensor:
    """Return ``exp(-x) - 1 + x``, ``[T]``, with x clamped as :func:`log_ratio` does."""
    change_T = log_ratio(logprobs_T, reference_T)
    return torch.expm1(-change_T) + change_T
