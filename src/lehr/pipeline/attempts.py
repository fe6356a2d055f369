"""Attempts at tasks from the far end of the train split, judged, for stages that learn from them afterwards."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Protocol

from lehr.core.trace import Sampling
from lehr.pipeline.context import Context
from lehr.pipeline.far_tasks import far_tasks
from lehr.pipeline.records import keep_trace
from lehr.rollout.base import Group
from lehr.rollout.group import GroupPlan


class Attempting(Protocol):
    """The part of a stage's settings that is read here."""

    @property
    def name(self) -> str:
        """Of the stage."""
        ...

    @property
    def tasks(self) -> int:
        """How many, over all domains."""
        ...

    @property
    def samples(self) -> int:
        """Attempts at each."""
        ...

    @property
    def temperature(self) -> float:
        """At which they are sampled."""
        ...


async def attempt(ctx: Context, stage: Attempting) -> list[Group]:
    """Return a group for each task, sampled from the weights in force; every trace is recorded."""
    await ctx.allot(engine=ctx.division.sampling)
    plans = [
        GroupPlan(
            f"{stage.name}-{task.position:05d}-{ctx.ledger.incarnation}",
            task.domain,
            task.domain.problem("train", task.index),
            stage.samples,
            Sampling(temperature=stage.temperature),
            ctx.recipe.seed,
        )
        for task in far_tasks(ctx.domains, ctx.recipe.stages, stage.name, stage.tasks)
    ]
    total = len(plans) * stage.samples
    ctx.observer.stage(f"{stage.name} sample", total, "attempts")
    done = 0
    gate = asyncio.Semaphore(max(1, ctx.recipe.evaluation.concurrency // stage.samples))

    async def one(plan: GroupPlan) -> Group:
        nonlocal done
        async with gate:
            group = await ctx.runner.run(
                plan, partial(keep_trace, ctx, stage=stage.name, domain=plan.domain.card.id)
            )
        done += stage.samples
        ctx.observer.advance(done, total)
        return group

    begun = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(plan)) for plan in plans]
    ctx.metrics.write(stage.name, 0, {"time/sampling_s": time.monotonic() - begun})
    return [task.result() for task in running]
