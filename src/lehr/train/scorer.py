"""What a model says of given sequences: a trainer's, or one that is only asked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lehr.core.batch import Sample
from lehr.core.errors import Diverged
from lehr.model.checkpoint import load_decoder, load_scalar
from lehr.model.decoder import Decoder
from lehr.model.dtype import compute_dtype
from lehr.train.base import TrainConfig
from lehr.train.gradient import score
from lehr.train.packing import pack

PROBE_TOKENS = 16
LARGEST = 1e18
"""Sizes of weights from which a float32 sum of squares may overflow."""


def score_samples(
    decoder: Decoder, samples: Sequence[Sample], tokens_per_microbatch: int
) -> list[NDArray[np.float32]]:
    """Return what :meth:`lehr.train.base.Trainer.score` does."""
    found = [np.zeros(int(s.own.sum()), np.float32) for s in samples]
    for part in pack(samples, tokens_per_microbatch):
        values = score(decoder, part).numpy()
        for index in np.unique(part.samples):
            found[index][:] = values[part.samples == index]
    return found


@torch.no_grad()
def require_finite(decoder: Decoder) -> None:
    """Raise :class:`Diverged` where nothing can be sampled from the weights: their squares overflow, or what
    they say of a short text is not finite. A step whose loss and gradient were finite can leave such weights.
    """
    sizes = [float(torch.linalg.vector_norm(weight, torch.inf)) for weight in decoder.parameters()]
    tokens = (np.arange(PROBE_TOKENS, dtype=np.int32) * 7) % decoder.config.vocab_size
    zeros = np.zeros(len(tokens), np.float32)
    (said,) = score_samples(decoder, [Sample(tokens, np.arange(len(tokens)) > 0, zeros, zeros)], len(tokens))
    if not all(size < LARGEST for size in sizes) or not np.isfinite(said).all():
        raise Diverged(
            f"weights of up to {max(sizes):.3g} give values that are not finite",
            hint="Lower learning_rate or go back to an earlier checkpoint.",
        )


class FrozenModel:
    """A reward model or a reference: weights in the compute dtype, and nothing that training needs."""

    def __init__(self, decoder: Decoder, config: TrainConfig | None = None) -> None:
        self.decoder = decoder
        self._config = config or TrainConfig()

    @classmethod
    def open(cls, folder: Path, config: TrainConfig | None = None, *, scalar: bool = False) -> FrozenModel:
        """Load the model in ``folder``; with ``scalar``, under a scalar head."""
        dtype = compute_dtype((config or TrainConfig()).dtype)
        return cls(load_scalar(folder, dtype) if scalar else load_decoder(folder, dtype), config)

    async def score(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """See :meth:`lehr.train.base.Trainer.score`."""
        return score_samples(self.decoder, samples, self._config.tokens_per_microbatch)

    async def close(self) -> None:
        """Nothing is left behind."""
