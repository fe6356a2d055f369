"""Loss functions on tensors ``[T]``, one entry per loss token; pure, and named in the recipe.

Every function returns the loss of each token, undivided. Whoever sums them divides by the number of loss
tokens of the whole batch (never by that of a sample, a micro-batch or a rank), so that the gradient depends
neither on packing nor on the split.

To add a policy loss: write it with the signature of :class:`PolicyLoss`, cite its source, add it to
:data:`POLICY_LOSSES` and its name to ``PolicyLossName`` in ``lehr.train.base``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from lehr.core.errors import UnknownName

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this size before they are exponentiated, so that they stay finite."""


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """The constants of the policy losses; the fields of ``TrainConfig`` of the same names."""

    mask_delta: float = 0.2
    tis_cap: float = 2.0
    log_ratio_penalty: float = 1e-3


class PolicyLoss(Protocol):
    """A policy-gradient loss with its correction for tokens that older weights sampled."""

    def __call__(
        self, logprobs_T: Tensor, sampled_T: Tensor, advantages_T: Tensor, terms: PolicyTerms
    ) -> Tensor:
        """Return the loss of each token, ``[T]``.

        ``logprobs_T`` carries gradient, ``sampled_T`` is what the sampler recorded; both are under the
        distribution at the sampling temperature.
        """
        ...


def cross_entropy(logprobs_T: Tensor) -> Tensor:
    """Return ``-log p`` of each token."""
    return -logprobs_T


def log_ratio(logprobs_T: Tensor, sampled_T: Tensor) -> Tensor:
    """Return ``log(pi / mu)``, clamped to ±:data:`MAX_LOG_RATIO`."""
    return (logprobs_T - sampled_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def dppo_keep(logprobs_T: Tensor, sampled_T: Tensor, advantages_T: Tensor, delta: float) -> Tensor:
    """Return which tokens keep their gradient: those that have not moved by more than ``delta`` in
    probability in the direction in which their advantage pushes them.
    """
    moved = logprobs_T.detach().exp() - sampled_T.exp()
    dropped = ((advantages_T > 0) & (moved > delta)) | ((advantages_T < 0) & (moved < -delta))
    return ~dropped


def dppo_tv(logprobs_T: Tensor, sampled_T: Tensor, advantages_T: Tensor, terms: PolicyTerms) -> Tensor:
    """Return ``-keep * A * r + c * (log r)^2`` with ``r = pi / mu``.

    ``keep`` is 0 where the probability has already moved by more than ``mask_delta`` the way that the
    advantage pushes it: a trust region in total variation per token instead of in the ratio, which rare
    tokens leave at once (DPPO, Qi et al. 2026, arXiv 2602.04879; the squared log ratio as in prime-rl).
    """
    keep = dppo_keep(logprobs_T, sampled_T, advantages_T, terms.mask_delta)
    change = log_ratio(logprobs_T, sampled_T)
    return -(keep * advantages_T * change.exp()) + terms.log_ratio_penalty * change.square()


def tis(logprobs_T: Tensor, sampled_T: Tensor, advantages_T: Tensor, terms: PolicyTerms) -> Tensor:
    """Return ``-min(r, cap) * A * log pi``, the weight without gradient: truncated importance sampling."""
    weight = log_ratio(logprobs_T.detach(), sampled_T).exp().clamp(max=terms.tis_cap)
    return -weight * advantages_T * logprobs_T


def uncorrected(logprobs_T: Tensor, sampled_T: Tensor, advantages_T: Tensor, terms: PolicyTerms) -> Tensor:
    """Return ``-A * log pi``, as if the current weights had sampled."""
    return -advantages_T * logprobs_T


POLICY_LOSSES: dict[str, PolicyLoss] = {"dppo_tv": dppo_tv, "tis": tis, "none": uncorrected}


def policy_loss(name: str) -> PolicyLoss:
    """Return the policy loss of that name, or raise :class:`UnknownName`."""
    if name not in POLICY_LOSSES:
        raise UnknownName.among("policy loss", name, POLICY_LOSSES)
    return POLICY_LOSSES[name]


def sequence_ratios(change_T: Tensor, sequence_T: Tensor, count: int) -> Tensor:
    """Return for each of ``count`` sequences the geometric mean of its tokens' ratios.

    ``change_T`` holds log ratios, ``sequence_T`` the number of the sequence of each token. A product would
    grow or vanish with the length; the geometric mean does not depend on it.
    """
    sums = torch.zeros(count, dtype=change_T.dtype).index_add_(0, sequence_T, change_T)
    lengths = torch.zeros(count, dtype=change_T.dtype).index_add_(0, sequence_T, torch.ones_like(change_T))
    return (sums / lengths.clamp(min=1)).exp()
