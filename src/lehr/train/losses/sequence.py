"""Losses whose ratio belongs to a whole sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from lehr.train.losses.base import PolicyTerms, PolicyTokens, log_ratio, sample_means


def gspo(logprobs_T: Tensor, tokens: PolicyTokens, terms: PolicyTerms) -> Tensor:
    """Return ``-min(s * A, clip(s, 1 - low, 1 + high) * A)`` with ``s`` the geometric mean of the sample's
    token ratios: whole sequences are clipped, not tokens.

    Every token carries the loss of its sequence; under ``mean_over = "sequence"`` their sum is that of the
    paper (GSPO, Zheng et al. 2025, arXiv 2507.18071, equations 5 to 7). The bounds are far narrower than those
    of a token's ratio, since a mean over many tokens moves far less.
    """
    means_S, row_T = sample_means(log_ratio(logprobs_T, tokens.sampled_T), tokens.samples_T)
    ratio_T = means_S.exp()[row_T]
    clipped_T = ratio_T.clamp(1 - terms.gspo_low, 1 + terms.gspo_high)
    return -torch.minimum(ratio_T * tokens.advantages_T, clipped_T * tokens.advantages_T)
