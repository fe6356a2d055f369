"""Rejection sampling: sample, verify, keep what passed, train on it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from lehr.core.batch import Sample
from lehr.core.reward import Valid
from lehr.core.trace import Sampling
from lehr.pipeline.context import Context
from lehr.pipeline.epochs import epoch_batches, steps_per_epoch
from lehr.pipeline.recipe import RejectStage, Stage
from lehr.pipeline.records import keep_trace
from lehr.rollout.base import Group
from lehr.rollout.group import GroupPlan


async def run_reject(ctx: Context, stage: RejectStage, start: Path) -> None:
    """Train on the model's own verified answers to tasks from the far end of the train split."""
    await ctx.trainer.load(start, optimizer=False)
    await ctx.trainer.reset(stage.train)
    await ctx.sync_weights()
    groups = await _sample(ctx, stage)
    samples = select(groups, stage.keep_per_task)
    sampled = sum(len(group.members) for group in groups)
    ctx.observer.note(f"kept {len(samples)} distinct verified answers of {sampled}")
    if not samples:
        return
    await ctx.allot(trainer=ctx.division.training)
    per_epoch = steps_per_epoch(samples, stage.batch_size)
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


async def _sample(ctx: Context, stage: RejectStage) -> list[Group]:
    await ctx.allot(engine=ctx.division.sampling)
    names = list(ctx.domains)
    plans: list[GroupPlan] = []
    taken = _taken_before(ctx.recipe.stages, stage.name)
    for position in range(taken, taken + stage.tasks):
        domain = ctx.domains[names[position % len(names)]]
        index = domain.card.splits.get("train", 0) - 1 - position // len(names)
        if index < 0:
            continue
        plans.append(
            GroupPlan(
                f"{stage.name}-{position:05d}-{ctx.ledger.incarnation}",
                domain,
                domain.problem("train", index),
                stage.samples,
                Sampling(temperature=stage.temperature),
                ctx.recipe.seed,
            )
        )
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


def _taken_before(stages: Sequence[Stage], name: str) -> int:
    """Return how many tasks earlier stages of this kind took, so that each round has tasks of its own."""
    earlier = itertools.takewhile(lambda stage: stage.name != name, stages)
    return sum(stage.tasks for stage in earlier if isinstance(stage, RejectStage))


def select(groups: Sequence[Group], keep_per_task: int) -> list[Sample]:
    """Return the passing answers, distinct by tokens, at most ``keep_per_task`` of each task."""
    samples: list[Sample] = []
    seen: set[bytes] = set()
    for group in groups:
        kept = 0
        for member in group.valid:
            if not (isinstance(member.reward, Valid) and member.reward.passed) or kept >= keep_per_task:
                continue
            for segment in member.trace.segments:
                key = segment.tokens.tobytes()
                if key in seen or not segment.own.any():
                    continue
                seen.add(key)
                kept += 1
                samples.append(
                    Sample(
                        tokens=segment.tokens,
                        own=segment.own,
                        logprobs=segment.logprobs,
                        advantages=segment.own.astype(np.float32),
                        prefix=group.domain,
                        trace_id=member.trace.id,
                        domain=group.domain,
                    )
                )
    return samples
