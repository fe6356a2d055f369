"""Supervised steps on a fixed set of answers, for as many epochs as were asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from lehr.core.batch import Sample
from lehr.pipeline.context import Context
from lehr.pipeline.epochs import epoch_batches, steps_per_epoch
from lehr.train.base import TrainConfig


class Imitating(Protocol):
    """The part of a stage's settings that is read here."""

    @property
    def name(self) -> str:
        """Of the stage."""
        ...

    @property
    def epochs(self) -> int:
        """Times that each sample is trained on."""
        ...

    @property
    def batch_size(self) -> int:
        """Samples in a step."""
        ...

    @property
    def train(self) -> TrainConfig:
        """How steps are taken."""
        ...


async def imitate(ctx: Context, stage: Imitating, samples: Sequence[Sample]) -> None:
    """Train on ``samples``; without any, do nothing."""
    if not samples:
        return
    await ctx.allot(trainer=ctx.division.training)
    per_epoch = steps_per_epoch(samples, stage.batch_size)
    await ctx.trainer.reset(stage.train.within(per_epoch * stage.epochs))
    ctx.observer.stage(f"{stage.name} train", per_epoch * stage.epochs, "steps")
    step = 0
    for epoch in range(stage.epochs):
        for batch in epoch_batches(
            samples, epoch=epoch, batch_size=stage.batch_size, seed=ctx.recipe.seed, first_step=step
        ):
            begun = time.monotonic()
            result = await ctx.trainer.step(batch)
            step += 1
            seconds = time.monotonic() - begun
            values = {f"{stage.name}/{k}": v for k, v in result.metrics.items()}
            ctx.metrics.write(stage.name, step, {**values, "time/training_s": seconds})
            ctx.observer.advance(step, per_epoch * stage.epochs, loss=round(result.metrics.get("loss", 0.0), 3))
