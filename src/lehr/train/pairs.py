"""From a micro-batch of pairs, or of a critic's tokens, to its loss and to what is told of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lehr.core.batch import LossName, Sample
from lehr.core.errors import ConfigError
from lehr.train.base import TrainConfig
from lehr.train.head import TokenLoss
from lehr.train.losses.critic import value_loss
from lehr.train.losses.preference import Paired, bradley_terry, dpo, ipo, margins
from lehr.train.packing import Microbatch

SCALAR: frozenset[LossName] = frozenset({"reward", "value"})
"""Losses of a scalar head; the others are of a vocabulary head."""


def require_pairs(samples: Sequence[Sample]) -> int:
    """Return how many pairs the samples make. Raises :class:`ConfigError` for one that is not whole."""
    sides: dict[str, list[bool]] = {}
    for sample in samples:
        sides.setdefault(sample.pair, []).append(sample.preferred)
    for pair, found in sides.items():
        if not pair or sorted(found) != [False, True]:
            name = f"the pair {pair!r}" if pair else "a sample without a pair"
            raise ConfigError(
                f"{name} has {sum(found)} preferred and {len(found) - sum(found)} other samples with a loss",
                expected="one of each",
            )
    return len(sides)


def paired(part: Microbatch, samples: Sequence[Sample]) -> Paired:
    """Return which tokens of a micro-batch are compared with which. ``samples``: those that were packed."""
    numbers = np.unique(part.samples)
    place = {(samples[n].pair, samples[n].preferred): row for row, n in enumerate(numbers)}
    keys = [samples[n].pair for n in numbers if samples[n].preferred]
    chosen, other = ([place[key, preferred] for key in keys] for preferred in (True, False))
    return Paired(torch.from_numpy(part.samples), torch.tensor(chosen), torch.tensor(other))


def pair_margins(
    values_T: Tensor, part: Microbatch, tied: Paired, loss: LossName, config: TrainConfig
) -> Tensor:
    """Return what the loss of each pair is a function of, ``[P]``."""
    if loss == "reward":
        ahead = None if part.returns is None else torch.from_numpy(part.returns)
        return margins(values_T if ahead is None else values_T - ahead.to(values_T), tied)
    if part.reference is None:
        raise ConfigError("samples of a preference loss carry no reference", expected="its log-probabilities")
    change_T = values_T - torch.from_numpy(part.reference).to(values_T)
    return margins(change_T, tied, mean=config.preference_loss == "ipo")


def pair_loss(part: Microbatch, samples: Sequence[Sample], loss: LossName, config: TrainConfig) -> TokenLoss:
    """Return the loss of a micro-batch of pairs: their sum, divided by the pairs of the whole batch."""
    tied, count = paired(part, samples), len(samples) // 2

    def of(values_T: Tensor, _: slice) -> Tensor:
        margin_P = pair_margins(values_T, part, tied, loss, config)
        if loss == "reward":
            return bradley_terry(margin_P) / count
        if config.preference_loss == "ipo":
            return ipo(margin_P, config.beta) / count
        return dpo(margin_P, config.beta, config.label_smoothing) / count

    return of


def critic_loss(part: Microbatch, weights_N: Tensor, clip: float | None) -> TokenLoss:
    """Return the loss of a critic's tokens, weighted."""
    if part.returns is None or part.values is None:
        raise ConfigError("samples of a value loss carry no returns or values", expected="both")
    returns, old = torch.from_numpy(part.returns), torch.from_numpy(part.values)
    return lambda values, cut: value_loss(values, old[cut], returns[cut], clip) * weights_N[cut]


def pair_health(
    micro: Sequence[Microbatch],
    values: Sequence[Tensor],
    samples: Sequence[Sample],
    loss: LossName,
    config: TrainConfig,
) -> dict[str, float]:
    """Return metrics over the pairs of one batch.

    margin: mean of what the loss is a function of. accuracy: pairs in which the preferred one is ahead; a tie
    counts half.
    """
    margin_P = torch.cat(
        [
            pair_margins(said.double(), part, paired(part, samples), loss, config)
            for part, said in zip(micro, values, strict=True)
        ]
    )
    ahead = (margin_P > 0).double() + (margin_P == 0).double() / 2
    return {"margin": float(margin_P.mean()), "accuracy": float(ahead.mean())}


def critic_health(micro: Sequence[Microbatch], values: Sequence[Tensor]) -> dict[str, float]:
    """Return the mean value, and how much of the returns' variance the values explain: 1 is all of it, 0 what
    their mean would, less is worse than that.
    """
    returns = np.concatenate([m.returns for m in micro if m.returns is not None]).astype(np.float64)
    said = torch.cat(list(values)).double().numpy()
    spread = float(returns.var())
    explained = 1 - float((returns - said).var()) / spread if spread > 0 else 0.0
    return {"value": float(said.mean()), "explained_variance": explained}
