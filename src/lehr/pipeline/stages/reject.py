"""Rejection sampling: sample, verify, keep what did best, train on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lehr.core.batch import Sample
from lehr.core.reward import Valid
from lehr.pipeline.attempts import attempt
from lehr.pipeline.choosing import Answered, Rule, choose
from lehr.pipeline.context import Context
from lehr.pipeline.imitate import imitate
from lehr.pipeline.recipe import RejectStage
from lehr.rollout.base import Group


async def run_reject(ctx: Context, stage: RejectStage, start: Path) -> None:
    """Train on the model's own verified answers to tasks from the far end of the train split."""
    await ctx.trainer.load(start, optimizer=False)
    await ctx.trainer.reset(stage.train)
    await ctx.sync_weights()
    groups = await attempt(ctx, stage)
    rule = Rule(stage.keep, stage.keep_per_task, stage.min_value, stage.near_duplicate)
    chosen = choose([answer for group in groups for answer in answers_of(group)], rule)
    sampled = sum(len(group.members) for group in groups)
    ctx.observer.note(f"kept {chosen.answers} answers of {sampled}: {chosen.why()}")
    await imitate(ctx, stage, chosen.samples)


def answers_of(group: Group) -> Iterator[Answered]:
    """Yield the attempts of a group that could be judged, each with the tokens that were really sampled."""
    for member in group.valid:
        segments = [segment for segment in member.trace.segments if segment.own.any()]
        if not isinstance(member.reward, Valid) or not segments:
            continue
        samples = tuple(
            Sample(
                tokens=segment.tokens,
                own=segment.own,
                logprobs=segment.logprobs,
                advantages=segment.own.astype(np.float32),
                prefix=group.domain,
                trace_id=member.trace.id,
                domain=group.domain,
            )
            for segment in segments
        )
        said = tuple(int(t) for segment in segments for t in segment.tokens[segment.own])
        yield Answered(group.task_id, member.reward.value, member.reward.passed, said, samples)
