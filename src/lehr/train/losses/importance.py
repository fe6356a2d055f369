"""The gradient of the log-probability, weighted by a ratio that carries no gradient."""

from __future__ import annotations

from torch import Tensor

from lehr.train.losses.base import PolicyTerms, PolicyTokens, log_ratio


def _weighted(logprobs_T: Tensor, tokens: PolicyTokens, cap: float) -> Tensor:
    weight_T = log_ratio(logprobs_T.detach(), tokens.sampled_T).exp().clamp(max=cap)
    return -weight_T * tokens.advantages_T * logprobs_T


def tis(logprobs_T: Tensor, tokens: PolicyTokens, terms: PolicyTerms) -> Tensor:
    """Return ``-min(r, tis_cap) * A * log pi``, the weight without gradient: truncated importance sampling
    (Ionides 2008, "Truncated importance sampling"; for a sampler that computes otherwise than the trainer: Yao
    et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training").
    """
    return _weighted(logprobs_T, tokens, terms.tis_cap)


def tis_bounded(logprobs_T: Tensor, tokens: PolicyTokens, terms: PolicyTerms) -> Tensor:
    """Return the tokens whose weight :func:`tis` caps, bool ``[T]``."""
    return log_ratio(logprobs_T, tokens.sampled_T).exp() > terms.tis_cap


def cispo(logprobs_T: Tensor, tokens: PolicyTokens, terms: PolicyTerms) -> Tensor:
    """Return ``-min(r, cispo_cap) * A * log pi``, the weight without gradient: no token loses its gradient,
    only its weight is bounded, and only from above (CISPO, MiniMax 2025, arXiv 2506.13585, equations 4 and 5,
    with the lower bound off, as there).

    The same formula as :func:`tis` with another purpose and bound: ``cispo_cap`` is the bound itself, as in
    TRL, not 1 plus something.
    """
    return _weighted(logprobs_T, tokens, terms.cispo_cap)


def cispo_bounded(logprobs_T: Tensor, tokens: PolicyTokens, terms: PolicyTerms) -> Tensor:
    """Return the tokens whose weight :func:`cispo` caps, bool ``[T]``."""
    return log_ratio(logprobs_T, tokens.sampled_T).exp() > terms.cispo_cap


def uncorrected(logprobs_T: Tensor, tokens: PolicyTokens, terms: PolicyTerms) -> Tensor:
    """Return ``-A * log pi``, as if the current weights had sampled (Williams 1992, REINFORCE)."""
    return -tokens.advantages_T * logprobs_T
