"""A trust region in probability instead of in the ratio."""

from __future__ import annotations

from torch import Tensor

from lehr.train.losses.base import PolicyTerms, PolicyTokens, log_ratio


def dppo_keep(logprobs_T: Tensor, sampled_T: Tensor, advantages_T: Tensor, delta: float) -> Tensor:
    """Return which tokens keep their gradient: those that have not moved by more than ``delta`` in
    probability in the direction in which their advantage pushes them.
    """
    moved = logprobs_T.detach().exp() - sampled_T.exp()
    dropped = ((advantages_T > 0) & (moved > delta)) | ((advantages_T < 0) & (moved < -delta))
    return ~dropped


def dppo_tv(logprobs_T: Tensor, tokens: PolicyTokens, terms: PolicyTerms) -> Tensor:
    """Return ``-keep * A * r + c * (log r)^2`` with ``r = pi / mu``.

    ``keep`` is 0 where the probability has already moved by more than ``mask_delta`` the way that the
    advantage pushes it: a trust region in total variation per token instead of in the ratio, which rare
    tokens leave at once (DPPO, Qi et al. 2026, arXiv 2602.04879; the squared log ratio as in prime-rl).
    """
    keep = dppo_keep(logprobs_T, tokens.sampled_T, tokens.advantages_T, terms.mask_delta)
    change = log_ratio(logprobs_T, tokens.sampled_T)
    return -(keep * tokens.advantages_T * change.exp()) + terms.log_ratio_penalty * change.square()
