"""What every policy loss is given, and the arithmetic that several of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped to this size before they are exponentiated, so that they stay finite."""


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """The constants of the policy losses; the fields of ``TrainConfig`` of the same names."""

    mask_delta: float = 0.2
    tis_cap: float = 2.0
    log_ratio_penalty: float = 1e-3
    gspo_low: float = 3e-4
    gspo_high: float = 4e-4


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """What is known of each loss token besides its log-probability now: float32 ``[T]`` unless said.

    sampled_T: log-probability that the sampler recorded, at the sampling temperature.
    advantages_T: of the token. samples_T: int64, the same number for all tokens of one sample.
    """

    sampled_T: Tensor
    advantages_T: Tensor
    samples_T: Tensor

    def __getitem__(self, part: slice) -> PolicyTokens:
        """Return a part of the tokens."""
        cut = {f.name: value[part] for f in fields(self) if (value := getattr(self, f.name)) is not None}
        return replace(self, **cut)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A policy-gradient loss with its correction for tokens that older weights sampled.

    function: returns the loss of each token, ``[T]``. Its first argument carries gradient.
    coupled: the loss of a token depends on other tokens of its sample, so that ``function`` must be given whole
    samples; the trainer then computes log-probabilities before it asks for a loss.
    """

    function: Callable[[Tensor, PolicyTokens, PolicyTerms], Tensor]
    coupled: bool = False


def log_ratio(logprobs_T: Tensor, sampled_T: Tensor) -> Tensor:
    """Return ``log(pi / mu)``, clamped to ±:data:`MAX_LOG_RATIO`."""
    return (logprobs_T - sampled_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sample_means(values_T: Tensor, samples_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean over the tokens of each sample, ``[S]`` in order of the samples' numbers, and the row
    of each token in it, ``[T]``. Differentiable in ``values_T``.
    """
    numbers, row_T = torch.unique(samples_T, return_inverse=True)
    zeros = values_T.new_zeros(len(numbers))
    lengths = zeros.index_add(0, row_T, torch.ones_like(values_T))
    return zeros.index_add(0, row_T, values_T) / lengths, row_T


def sequence_ratios(change_T: Tensor, samples_T: Tensor) -> Tensor:
    """Return for each sample the geometric mean of its tokens' ratios, ``[S]``.

    ``change_T`` holds log ratios. A product would grow or vanish with the length; the geometric mean does not
    depend on it.
    """
    return sample_means(change_T, samples_T)[0].exp()
