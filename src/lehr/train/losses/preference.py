"""Losses of comparisons, on margins ``[P]``: by how much the preferred one of each pair is ahead.

A margin is the difference of two sums over a sample's tokens (:func:`margins`), so that these losses couple all
tokens of a pair. Every function returns the loss of each pair, undivided.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from lehr.train.losses.base import sample_means


@dataclass(frozen=True, slots=True)
class Paired:
    """Which tokens are compared with which.

    samples_T: int64, the same number for all tokens of one sample. preferred_P, other_P: int64, places in the
    sorted list of those numbers; pair p compares ``preferred_P[p]`` with ``other_P[p]``.
    """

    samples_T: Tensor
    preferred_P: Tensor
    other_P: Tensor


def margins(values_T: Tensor, paired: Paired, *, mean: bool = False) -> Tensor:
    """Return the sum of the preferred sample's values less that of the other's, ``[P]``; with ``mean``, the
    difference of their means over tokens. Differentiable in ``values_T``.
    """
    means_S, row_T = sample_means(values_T, paired.samples_T)
    of_S = means_S if mean else means_S * row_T.bincount(minlength=len(means_S))
    return of_S[paired.preferred_P] - of_S[paired.other_P]


def bradley_terry(margin_P: Tensor) -> Tensor:
    """Return ``-log sigmoid(margin)``: the model of Bradley and Terry (1952) as reward models are trained with
    it (Ouyang et al. 2022, arXiv 2203.02155, equation 1). A margin that the preferred one has to be ahead by is
    subtracted beforehand (Touvron et al. 2023, arXiv 2307.09288, equation 2).
    """
    return -functional.logsigmoid(margin_P)


def dpo(margin_P: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """Return ``-log sigmoid(beta * h)``, where the margin ``h`` is that of ``log pi - log reference``, summed
    over tokens (Rafailov et al. 2023, arXiv 2305.18290, equation 7).

    ``smoothing`` is the share of labels taken to be wrong: ``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta
    h)`` (conservative DPO; Mitchell 2023, "A note on DPO with noisy preferences").
    """
    wrong = -functional.logsigmoid(-beta * margin_P)
    return (1 - smoothing) * -functional.logsigmoid(beta * margin_P) + smoothing * wrong


def ipo(margin_P: Tensor, beta: float) -> Tensor:
    """Return ``(h - 1 / (2 beta))^2``, which pulls the margin to a finite size instead of letting it grow for
    ever (Azar et al. 2023, arXiv 2310.12036, equation 17). ``h`` is that of the mean over tokens, so that the
    size does not depend on the answers' lengths.
    """
    return (margin_P - 1 / (2 * beta)).square()
