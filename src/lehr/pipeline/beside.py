"""Models beside the policy, each in a process of its own: reward models, critics and frozen references."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lehr.cluster.base import Role
from lehr.cluster.local import LocalCluster
from lehr.core.batch import Sample
from lehr.pipeline.context import Context
from lehr.train.base import TrainConfig
from lehr.train.remote import RemoteTrainer

MESSAGE = 256
"""Samples in one message."""


@asynccontextmanager
async def open_beside(
    ctx: Context, name: str, folder: Path, train: TrainConfig | None = None, *, scalar: bool = True
) -> AsyncGenerator[RemoteTrainer]:
    """Start a trainer ``name`` on the model in ``folder``, under a scalar head or its own; end it whatever
    happens. Without ``train`` it can only be asked. Its threads stay the same over a run and its resumption,
    and so does what it computes.
    """
    cluster = LocalCluster(ctx.folder.path)
    body = {
        "model": str(folder),
        "scalar": scalar,
        "frozen": train is None,
        "train": (train or TrainConfig()).model_dump(),
        "seed": ctx.recipe.seed,
    }
    try:
        role = Role(name, "lehr.train.role:build", body, threads=ctx.division.shared_training.threads)
        yield RemoteTrainer(await cluster.start(role))
    finally:
        await asyncio.shield(cluster.close())


class Scoring(Protocol):
    """The part of a trainer that a model which is only asked has as well."""

    async def score(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """See :meth:`lehr.train.base.Trainer.score`."""
        ...


async def score_all(model: Scoring, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
    """Return what the model says of each sample, a bounded number of them a message."""
    found: list[NDArray[np.float32]] = []
    for start in range(0, len(samples), MESSAGE):
        found += await model.score(samples[start : start + MESSAGE])
    return found


def over_tokens(sample: Sample, own: NDArray[np.floating]) -> NDArray[np.float32]:
    """Return float32 ``[T]``: ``own`` at the sample's own tokens, 0 elsewhere."""
    found = np.zeros(len(sample.tokens), np.float32)
    found[sample.own] = own
    return found
