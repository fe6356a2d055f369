"""The whole loss of a policy-gradient step: a policy loss, the masks over it, and the penalty beside it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lehr.train.losses.base import PolicyLoss, PolicyTerms, PolicyTokens
from lehr.train.losses.divergence import k2
from lehr.train.losses.masks import geometric_keep, off_policy_keep


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """Called with the log-probabilities of tokens, ``[T]``, and what is known of them; returns losses ``[T]``.

    geometric_mask, off_policy_delta: see :mod:`lehr.train.losses.masks`; None is off.
    loss_kl: weight of :func:`lehr.train.losses.divergence.k2` to the reference, which no mask touches.
    """

    loss: PolicyLoss
    terms: PolicyTerms
    geometric_mask: tuple[float, float] | None = None
    off_policy_delta: float | None = None
    loss_kl: float = 0.0

    @property
    def coupled(self) -> bool:
        """Whether it must be called with all tokens of a sample at once."""
        return self.loss.coupled or self.geometric_mask is not None or self.off_policy_delta is not None

    def __call__(self, logprobs_T: Tensor, tokens: PolicyTokens) -> Tensor:
        """Return the loss of each token, undivided."""
        loss_T = self.loss.function(logprobs_T, tokens, self.terms)
        keep_T = self.keep(logprobs_T, tokens)
        if keep_T is not None:
            loss_T = loss_T * keep_T
        if self.loss_kl > 0:
            loss_T = loss_T + self.loss_kl * k2(logprobs_T, tokens.require_reference())
        return loss_T

    def keep(self, logprobs_T: Tensor, tokens: PolicyTokens) -> Tensor | None:
        """Return which tokens the sequence masks keep, bool ``[T]``, or None without a mask."""
        keep_T: Tensor | None = None
        if self.geometric_mask is not None:
            keep_T = geometric_keep(logprobs_T, tokens, self.geometric_mask)
        if self.off_policy_delta is not None:
            other_T = off_policy_keep(logprobs_T, tokens, self.off_policy_delta)
            keep_T = other_T if keep_T is None else keep_T & other_T
        return keep_T
