"""Loss functions on tensors ``[T]``, one entry per loss token; pure, and named in the recipe.

Every function returns the loss of each token, undivided. Whoever sums them divides by the number of loss
tokens of the whole batch (never by that of a sample, a micro-batch or a rank), so that the gradient depends
neither on packing nor on the split.

To add a policy loss: write its function in the file of its family, cite its source, add it to
:data:`POLICY_LOSSES` (``coupled`` where a token's loss depends on its sample's other tokens) and its name to
``PolicyLossName`` in ``lehr.train.base``.
"""

from __future__ import annotations

from torch import Tensor

from lehr.core.errors import UnknownName
from lehr.train.losses.base import (
    PolicyLoss,
    PolicyTerms,
    PolicyTokens,
    log_ratio,
    sample_means,
    sequence_ratios,
)
from lehr.train.losses.importance import tis, uncorrected
from lehr.train.losses.sequence import gspo
from lehr.train.losses.trust import dppo_keep, dppo_tv

__all__ = [
    "POLICY_LOSSES",
    "PolicyLoss",
    "PolicyTerms",
    "PolicyTokens",
    "cross_entropy",
    "dppo_keep",
    "dppo_tv",
    "gspo",
    "log_ratio",
    "policy_loss",
    "sample_means",
    "sequence_ratios",
    "tis",
    "uncorrected",
]

POLICY_LOSSES: dict[str, PolicyLoss] = {
    "dppo_tv": PolicyLoss(dppo_tv),
    "tis": PolicyLoss(tis),
    "gspo": PolicyLoss(gspo, coupled=True),
    "none": PolicyLoss(uncorrected),
}


def policy_loss(name: str) -> PolicyLoss:
    """Return the policy loss of that name, or raise :class:`UnknownName`."""
    if name not in POLICY_LOSSES:
        raise UnknownName.among("policy loss", name, POLICY_LOSSES)
    return POLICY_LOSSES[name]


def cross_entropy(logprobs_T: Tensor) -> Tensor:
    """Return ``-log p`` of each token."""
    return -logprobs_T
