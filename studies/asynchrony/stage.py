"""Reinforcement learning with a lag that is exact, and with measurements between its steps.

Measured at the temperature of training: where it is greedy, a model this small answers many tasks of a domain
with the same words, so that a domain would be solved as a whole or not at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

from lehr.core.trace import Sampling
from lehr.pipeline.context import Context
from lehr.pipeline.measure import measure
from lehr.pipeline.recipe import RlStage
from lehr.pipeline.run import STAGES
from lehr.pipeline.stages.rl import RlRun
from lehr.rollout.base import DropReason, Group
from lehr.rollout.buffer import Filled, Starved

POLL_S = 0.01


class MeasuredRun(RlRun):
    """The stage as it is, measured on held-out tasks after every ``every`` steps.

    lockstep: take no step before everything that admission allows has been sampled. The oldest batch then lags
    behind by ``staleness_bound`` versions, whatever the machine has to do besides; left alone, the lag is
    whatever sampler and trainer make of it, up to the bound.
    """

    def __init__(self, ctx: Context, stage: RlStage, *, every: int, lockstep: bool) -> None:
        super().__init__(ctx, stage)
        self.every = every
        self.lockstep = lockstep
        self.refused = 0
        self.broken = False

    def teaches(self, group: Group) -> DropReason | None:
        """Count besides how many groups in a row taught nothing."""
        reason = super().teaches(group)
        self.refused = 0 if reason is None else self.refused + 1
        return reason

    async def _dispatch(self) -> None:
        try:
            await super()._dispatch()
        finally:
            self.broken = True

    async def _take(self) -> Filled | Starved:
        stage = self.stage
        if self.lockstep:
            await self._synced()
            await self.ctx.allot(engine=self.ctx.division.sampling)
            allowed = (stage.staleness_bound + 1) * stage.groups_per_batch
            limit = stage.refuse_batches * stage.groups_per_batch
            while len(self.buffer) < allowed and self.refused < limit and not self.broken:
                await asyncio.sleep(POLL_S)
            self.refused = 0
        return await super()._take()

    async def _steps(self, first: int) -> None:
        if first == 1:
            await self._measure(0)
        await super()._steps(first)

    async def _step(self, step: int, groups: Sequence[Group], waited_s: float) -> str:
        diverged = await super()._step(step, groups, waited_s)
        if not diverged and step % self.every == 0:
            await self._synced()
            await self._measure(step)
        return diverged

    async def _measure(self, step: int) -> None:
        sampled = Sampled(**{field.name: getattr(self.ctx, field.name) for field in fields(Context)})
        await measure(sampled, label(step), split="heldout", count=self.ctx.recipe.evaluation.count)


class Sampled(Context):
    """The same context, whose measurements are not greedy."""

    @property
    def greedy(self) -> Sampling:
        """Return how tasks are answered."""
        return Sampling(temperature=1.0)


def label(step: int) -> str:
    """Return the name under which the ledger has the measurement after ``step``."""
    return f"after step {step}"


@contextmanager
def measured(*, every: int, lockstep: bool) -> Generator[None]:
    """Within the block, the pipeline runs its stages of type ``rl`` as :class:`MeasuredRun`."""

    async def run(ctx: Context, stage: RlStage, start: Path) -> str:
        return await MeasuredRun(ctx, stage, every=every, lockstep=lockstep).run(start)

    usual = STAGES["rl"]
    STAGES["rl"] = run
    try:
        yield
    finally:
        STAGES["rl"] = usual
