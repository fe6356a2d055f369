"""Distillation from a teacher's answers, or from its word on the student's.

Off policy, every answer is written to ``STAGE.jsonl`` in the run's folder as it comes: a file that an ``sft``
stage takes as ``data``, and from which a stage that was interrupted goes on without asking again.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lehr.core.batch import Batch, Sample
from lehr.core.reward import Valid
from lehr.core.task import Message
from lehr.core.trace import Sampling, Segment
from lehr.engine.base import Engine
from lehr.ledger.rows import ReplayRow
from lehr.pipeline.choosing import Answered, Rule, choose
from lehr.pipeline.context import Context
from lehr.pipeline.conversations import as_line, read_conversations, to_sample
from lehr.pipeline.far_tasks import FarTask, far_tasks
from lehr.pipeline.folder import replace_text
from lehr.pipeline.imitate import imitate
from lehr.pipeline.models import context_tokens, locate_model
from lehr.pipeline.recipe import DistillStage, RlStage
from lehr.pipeline.records import keep_trace
from lehr.pipeline.stages.rl import RlRun
from lehr.pipeline.teacher import open_completer, open_scorer
from lehr.rollout.base import DropReason, Group
from lehr.rollout.chat import ChatLoop
from lehr.rollout.group import GroupPlan, GroupRunner


async def run_distill(ctx: Context, stage: DistillStage, start: Path) -> str | None:
    """Train from ``start`` on what the teacher says; returns what there is to say at the end."""
    if stage.method == "off_policy":
        return await _off_policy(ctx, stage, start)
    folder = locate_model(stage.teacher, ctx.observer)
    async with open_scorer(ctx, folder) as teacher:
        return await _OnPolicy(ctx, stage, teacher, context_tokens(folder)).run(start)


# ---- off policy


async def _off_policy(ctx: Context, stage: DistillStage, start: Path) -> None:
    await ctx.trainer.load(start, optimizer=False)
    await ctx.trainer.reset(stage.train)
    path = ctx.folder.path / f"{stage.name}.jsonl"
    await _ask(ctx, stage, path)
    answers, refused = await asyncio.to_thread(_answers, ctx, stage, path)
    if not stage.verified:
        answers = [Answered(a.task, a.value, True, a.said, a.samples) for a in answers]
    chosen = choose(answers, Rule(keep_per_task=stage.keep_per_task))
    long = f", {refused} longer than {stage.max_tokens} tokens" if refused else ""
    ctx.observer.note(f"kept {chosen.answers} answers of {len(answers) + refused}: {chosen.why()}{long}")
    await imitate(ctx, stage, chosen.samples)


async def _ask(ctx: Context, stage: DistillStage, path: Path) -> None:
    """Let the teacher answer every task that ``path`` has no answer to yet, and write its answers there."""
    done = _finished(path)
    tasks = far_tasks(ctx.domains, ctx.recipe.stages, stage.name, stage.tasks)
    left = [task for task in tasks if _group_id(stage, task) not in done]
    total = len(tasks) * stage.samples
    ctx.observer.stage(f"{stage.name} ask", total, "answers")
    asked = total - len(left) * stage.samples
    ctx.observer.advance(asked, total)
    if not left:
        return
    said: dict[str, tuple[Message, ...]] = {}
    gate = asyncio.Semaphore(max(1, ctx.recipe.evaluation.concurrency // stage.samples))
    begun = time.monotonic()
    with path.open("a") as out:
        async with open_completer(ctx, stage) as completer, asyncio.TaskGroup() as running:
            loop = ChatLoop(completer, ctx.pool, heard=lambda trace, said_: said.update({trace: tuple(said_)}))
            runner = GroupRunner(loop, ctx.pool, meter=ctx.verifying)

            async def one(task: FarTask) -> None:
                nonlocal asked
                async with gate:
                    keep = partial(keep_trace, ctx, stage=stage.name, domain=task.domain.card.id)
                    group = await runner.run(_plan(ctx, stage, task), keep)
                out.write("".join(_lines(group, said)))
                out.flush()
                asked += stage.samples
                ctx.observer.advance(asked, total)

            for task in left:
                running.create_task(one(task))
    ctx.metrics.write(stage.name, 0, {"time/sampling_s": time.monotonic() - begun})


def _plan(ctx: Context, stage: DistillStage, task: FarTask) -> GroupPlan:
    return GroupPlan(
        _group_id(stage, task),
        task.domain,
        task.domain.problem("train", task.index),
        stage.samples,
        Sampling(temperature=stage.temperature),
        ctx.recipe.seed,
    )


def _group_id(stage: DistillStage, task: FarTask) -> str:
    return f"{stage.name}-{task.position:05d}"


def _lines(group: Group, said: dict[str, tuple[Message, ...]]) -> list[str]:
    """Return a line for each answer that came to its end and could be judged."""
    found: list[str] = []
    for member in group.valid:
        messages = said.pop(member.trace.id, None)
        if messages is None or not isinstance(member.reward, Valid) or member.trace.stop == "length":
            continue
        more = {
            "group": group.id,
            "task": group.task_id,
            "domain": group.domain,
            "value": member.reward.value,
            "passed": member.reward.passed,
        }
        found.append(as_line(messages, more))
    return found


def _finished(path: Path) -> set[str]:
    """Return the groups that have answers in the file; a line that a crash cut short is removed."""
    if not path.exists():
        return set()
    whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    replace_text(path, "".join(whole))
    return {json.loads(line)["group"] for line in whole}


def _answers(ctx: Context, stage: DistillStage, path: Path) -> tuple[list[Answered], int]:
    """Return the answers in the file, rendered for the student, and how many are too long."""
    if not path.stat().st_size:
        return [], 0
    facts: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()]
    found: list[Answered] = []
    refused = 0
    for conversation, fact in zip(read_conversations(path, ctx.renderer), facts, strict=True):
        sample = to_sample(conversation, ctx.renderer)
        if len(sample.tokens) > stage.max_tokens:
            refused += 1
            continue
        own = tuple(int(t) for t in sample.tokens[sample.own])
        found.append(Answered(fact["task"], fact["value"], fact["passed"], own, (sample,)))
    return found, refused


# ---- on policy


class _OnPolicy(RlRun):
    """The student answers; the advantage of each of its tokens is log teacher - log student, clipped: the
    gradient of the reverse KL divergence at that token (GKD, Agarwal et al. 2024, arXiv 2306.13649, with the
    student's samples alone; MiniLLM, Gu et al. 2024, arXiv 2306.08543; without a discount, as Thinking Machines
    Lab 2025).
    """

    def __init__(self, ctx: Context, stage: DistillStage, teacher: Engine, longest: int) -> None:
        rl = RlStage(
            name=stage.name,
            steps=stage.steps,
            groups_per_batch=stage.tasks_per_step,
            group_size=stage.group_size,
            staleness_bound=stage.staleness_bound,
            temperature=stage.temperature,
            checkpoint_every=stage.checkpoint_every,
            train=stage.train,
        )
        super().__init__(ctx, rl)
        self._clip = stage.clip
        self._teacher = teacher
        self._longest = longest

    def teaches(self, group: Group) -> DropReason | None:
        """Any answer teaches, whatever it was worth."""
        return None if any(_segments(group)) else "no_survivors"

    async def apply(
        self, step: int, groups: Sequence[Group], replays: Sequence[ReplayRow] = ()
    ) -> dict[str, float]:
        """Have the teacher score the batch, then take its step. Nothing is replayed."""
        del replays
        parts = [(group, *part) for group in groups for part in _segments(group)]
        fitting = [part for part in parts if len(part[2]) <= self._longest]
        async with asyncio.TaskGroup() as tasks:
            scoring = [
                tasks.create_task(self._teacher.score(s.tokens.tolist(), temperature=s.sampling.temperature))
                for _, _, s in fitting
            ]
        samples: list[Sample] = []
        gaps: list[NDArray[np.float32]] = []
        for (group, trace_id, segment), scored in zip(fitting, scoring, strict=True):
            gap = token_gaps(segment, scored.result())
            gaps.append(gap[segment.own])
            samples.append(
                Sample(
                    tokens=segment.tokens,
                    own=segment.own,
                    logprobs=segment.raw_logprobs,
                    advantages=np.clip(gap, -self._clip, self._clip),
                    temperature=segment.sampling.temperature,
                    prefix=group.id,
                    trace_id=trace_id,
                    domain=group.domain,
                )
            )
        result = await self.ctx.trainer.step(Batch(step, "policy_gradient", tuple(samples)))
        kl = -float(np.concatenate(gaps).mean()) if gaps else 0.0
        return {**result.metrics, "reverse_kl": kl, "unscored": float(len(parts) - len(fitting))}


def _segments(group: Group) -> list[tuple[str, Segment]]:
    """Return what there is to score in a group: also of answers that could not be judged."""
    members = [m for m in group.members if m.trace.failure is None]
    return [(m.trace.id, s) for m in members for s in m.trace.segments if s.own.any()]


def token_gaps(segment: Segment, scored: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return log teacher - log student of each own token, 0 elsewhere; float32[T].

    scored: float32[T-1], the teacher's log-probability of each token after the first at the temperature at
    which the student sampled, to which ``raw_logprobs`` belongs as well.
    """
    teacher = np.concatenate([np.zeros(1, np.float32), scored])
    return np.where(segment.own, teacher - segment.raw_logprobs, np.float32(0)).astype(np.float32)
