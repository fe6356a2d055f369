"""Whole sequences left out of the policy loss because they are too far off the policy.

Their tokens still count in the denominator: a mask takes gradient away and never makes what is left larger.
"""

from __future__ import annotations

from torch import Tensor

from lehr.train.losses.base import PolicyTokens, log_ratio, sample_means


def geometric_keep(logprobs_T: Tensor, tokens: PolicyTokens, bounds: tuple[float, float]) -> Tensor:
    """Return bool ``[T]``: tokens of samples whose geometric mean of ``pi / mu`` is within ``bounds``
    (Liu, Li et al. 2025, "When speed kills stability: demystifying RL collapse from the training-inference
    mismatch": geometric rejection of sequences).
    """
    means_S, row_T = sample_means(log_ratio(logprobs_T.detach(), tokens.sampled_T), tokens.samples_T)
    ratio_S = means_S.exp()
    return ((ratio_S >= bounds[0]) & (ratio_S <= bounds[1]))[row_T]


def off_policy_keep(logprobs_T: Tensor, tokens: PolicyTokens, delta: float) -> Tensor:
    """Return bool ``[T]``: False where ``A < 0`` and the sample's mean of ``log(mu / pi)`` is above ``delta``.

    What the policy would hardly say any more need not be pushed down further (DeepSeek-V3.2, 2025, arXiv
    2512.02556, eq. 9).
    """
    means_S, row_T = sample_means(log_ratio(tokens.sampled_T, logprobs_T.detach()), tokens.samples_T)
    return ~((tokens.advantages_T < 0) & (means_S > delta)[row_T])
