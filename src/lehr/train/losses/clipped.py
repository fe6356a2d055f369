"""The clipped surrogate of PPO, and the two that are built on it."""

from __future__ import annotations

import torch
from torch import Tensor

from lehr.train.losses.base import PolicyTerms, PolicyTokens, log_ratio, sample_means


def clipped_surrogate(ratio_T: Tensor, advantages_T: Tensor, low: float, high: float) -> Tensor:
    """Return ``-min(r * A, clip(r, 1 - low, 1 + high) * A)`` (Schulman et al. 2017, arXiv 1707.06347, eq.
    7).
    """
    return -torch.minimum(ratio_T * advantages_T, ratio_T.clamp(1 - low, 1 + high) * advantages_T)


def outside(ratio_T: Tensor, advantages_T: Tensor, low: float, high: float) -> Tensor:
    """Return the tokens whose gradient :func:`clipped_surrogate` cuts, bool ``[T]``."""
    return ((advantages_T > 0) & (ratio_T > 1 + high)) | ((advantages_T < 0) & (ratio_T < 1 - low))


def ppo_clip(logprobs_T: Tensor, tokens: PolicyTokens, terms: PolicyTerms) -> Tensor:
    """Return the clipped surrogate of ``r = pi / mu``, and for ``A < 0`` at most ``-c * A``.

    ``clip_high`` above ``clip_low`` leaves unlikely tokens room to grow (DAPO, Yu et al. 2025, arXiv
    2503.14476, section 3.1). ``dual_clip`` is c, above 1: without it the loss of a token with A < 0 that has
    become far likelier has no bound (Ye et al. 2020, arXiv 1912.09729, eq. 5). None is off.
    """
    return _surrogate(log_ratio(logprobs_T, tokens.sampled_T).exp(), tokens.advantages_T, terms)


def ppo_bounded(logprobs_T: Tensor, tokens: PolicyTokens, terms: PolicyTerms) -> Tensor:
    """Return the tokens whose gradient :func:`ppo_clip` cuts, bool ``[T]``."""
    return _cut(log_ratio(logprobs_T, tokens.sampled_T).exp(), tokens.advantages_T, terms)


def decoupled_ppo(logprobs_T: Tensor, tokens: PolicyTokens, terms: PolicyTerms) -> Tensor:
    """Return ``min(pi_prox / mu, cap)``, without gradient, times the clipped surrogate of ``pi / pi_prox``.

    What bounds the step is the distance from the weights before the first pass over the batch (``pi_prox``),
    not from those that sampled (``mu``), which may be several versions old; the weight corrects for their
    difference (Hilton et al. 2022, arXiv 2110.00641; AReaL, Fu et al. 2025, arXiv 2505.24298, eq. 5). In the
    first pass ``pi_prox`` is ``pi`` itself. ``behaviour_cap`` is the cap.
    """
    proximal_T = logprobs_T.detach() if tokens.proximal_T is None else tokens.proximal_T
    weight_T = log_ratio(proximal_T, tokens.sampled_T).exp().clamp(max=terms.behaviour_cap)
    return weight_T * _surrogate(log_ratio(logprobs_T, proximal_T).exp(), tokens.advantages_T, terms)


def decoupled_bounded(logprobs_T: Tensor, tokens: PolicyTokens, terms: PolicyTerms) -> Tensor:
    """Return the tokens whose gradient :func:`decoupled_ppo` cuts or whose weight it caps, bool ``[T]``."""
    proximal_T = logprobs_T if tokens.proximal_T is None else tokens.proximal_T
    cut_T = _cut(log_ratio(logprobs_T, proximal_T).exp(), tokens.advantages_T, terms)
    return cut_T | (log_ratio(proximal_T, tokens.sampled_T).exp() > terms.behaviour_cap)


def gspo(logprobs_T: Tensor, tokens: PolicyTokens, terms: PolicyTerms) -> Tensor:
    """Return the clipped surrogate of ``s``, the geometric mean of the sample's token ratios: whole sequences
    are clipped, not tokens.

    Every token carries the loss of its sequence; under ``mean_over = "sequence"`` their sum is that of the
    paper (Zheng et al. 2025, arXiv 2507.18071, equations 5 to 7). The bounds ``gspo_low`` and ``gspo_high`` are
    far narrower than those of a token's ratio, since a mean over many tokens moves far less.
    """
    return clipped_surrogate(
        _sequence_ratio(logprobs_T, tokens), tokens.advantages_T, terms.gspo_low, terms.gspo_high
    )


def gspo_bounded(logprobs_T: Tensor, tokens: PolicyTokens, terms: PolicyTerms) -> Tensor:
    """Return the tokens of the sequences that :func:`gspo` clips, bool ``[T]``."""
    return outside(_sequence_ratio(logprobs_T, tokens), tokens.advantages_T, terms.gspo_low, terms.gspo_high)


def _sequence_ratio(logprobs_T: Tensor, tokens: PolicyTokens) -> Tensor:
    means_S, row_T = sample_means(log_ratio(logprobs_T, tokens.sampled_T), tokens.samples_T)
    return means_S.exp()[row_T]


def _surrogate(ratio_T: Tensor, advantages_T: Tensor, terms: PolicyTerms) -> Tensor:
    loss_T = clipped_surrogate(ratio_T, advantages_T, terms.clip_low, terms.clip_high)
    if terms.dual_clip is None:
        return loss_T
    return torch.where(advantages_T < 0, torch.minimum(loss_T, -terms.dual_clip * advantages_T), loss_T)


def _cut(ratio_T: Tensor, advantages_T: Tensor, terms: PolicyTerms) -> Tensor:
    cut_T = outside(ratio_T, advantages_T, terms.clip_low, terms.clip_high)
    if terms.dual_clip is None:
        return cut_T
    return cut_T | ((advantages_T < 0) & (ratio_T > terms.dual_clip))
