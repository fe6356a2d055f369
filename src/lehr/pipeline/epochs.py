"""Supervised steps over a set of samples, epoch by epoch, in an order that a seed fixes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from lehr.core.batch import Batch, Sample


def epoch_batches(
    samples: Sequence[Sample], *, epoch: int, batch_size: int, seed: int, first_step: int
) -> Iterator[Batch]:
    """Yield the batches of one epoch: every sample once, shuffled by (seed, epoch)."""
    order = list(range(len(samples)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    for number, start in enumerate(range(0, len(order), batch_size)):
        chosen = tuple(samples[i] for i in order[start : start + batch_size])
        yield Batch(first_step + number, "sft", chosen)


def steps_per_epoch(samples: Sequence[Sample], batch_size: int) -> int:
    """Return how many batches one epoch has."""
    return -(-len(samples) // batch_size)
