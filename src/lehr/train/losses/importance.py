"""The gradient of the log-probability, weighted by a ratio that carries no gradient."""

from __future__ import annotations

from torch import Tensor

from lehr.train.losses.base import PolicyTerms, PolicyTokens, log_ratio


def tis(logprobs_T: Tensor, tokens: PolicyTokens, terms: PolicyTerms) -> Tensor:
    """Return ``-min(r, cap) * A * log pi``, the weight without gradient: truncated importance sampling
    (Ionides 2008, "Truncated importance sampling", eq. 3; for a sampler that differs from the trainer: Yao et
    al.
    2025, "Your efficient RL framework secretly brings you off-policy RL training").
    """
    weight = log_ratio(logprobs_T.detach(), tokens.sampled_T).exp().clamp(max=terms.tis_cap)
    return -weight * tokens.advantages_T * logprobs_T


def uncorrected(logprobs_T: Tensor, tokens: PolicyTokens, terms: PolicyTerms) -> Tensor:
    """Return ``-A * log pi``, as if the current weights had sampled."""
    return -tokens.advantages_T * logprobs_T
