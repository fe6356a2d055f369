"""Asynchronous reinforcement learning: groups run while the trainer steps, bounded by admission.

Exactly once: a group is recorded before it runs, a batch before its step. After a crash, batches that
were recorded past the last checkpoint are applied again from their stored traces, finished groups return
to the buffer, and groups that were still running start again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lehr.core.batch import Batch, Manifest
from lehr.core.reward import Valid
from lehr.core.trace import Sampling, Version
from lehr.ledger.rows import ResumeView
from lehr.pipeline.context import Context
from lehr.pipeline.recipe import RlStage
from lehr.pipeline.records import ENDED_EARLY, keep_trace, load_group
from lehr.pipeline.samples import DomainScales, to_samples
from lehr.pipeline.stages.rl_metrics import group_metrics
from lehr.rollout.base import DropReason, Group
from lehr.rollout.buffer import Buffer, Filled, Starved
from lehr.rollout.dispatcher import Dispatcher
from lehr.rollout.group import GroupPlan
from lehr.schedule.admission import Admission
from lehr.schedule.base import Outcome
from lehr.schedule.scheduler import PassRateScheduler, SchedulerConfig


async def run_rl(ctx: Context, stage: RlStage, start: Path) -> str:
    """Train from ``start``, or from the last checkpoint inside the stage when it is resumed.

    Returns a sentence where the stage ended early or trained less than it was to, else nothing.
    """
    return await _RlRun(ctx, stage).run(start)


class _RlRun:
    def __init__(self, ctx: Context, stage: RlStage) -> None:
        self.ctx = ctx
        self.stage = stage
        self.scheduler = PassRateScheduler(
            SchedulerConfig(target=stage.target_pass_rate),
            {name: domain.card.splits.get("train", 0) for name, domain in ctx.domains.items()},
            split="train",
            seed=ctx.recipe.seed,
        )
        self.admission = Admission(bound=stage.staleness_bound, groups_per_batch=stage.groups_per_batch)
        self.scales = DomainScales({})
        self.buffer = Buffer(
            self._drop, refuse_limit=stage.refuse_batches * stage.groups_per_batch, credit=stage.credit
        )
        self.dispatcher = Dispatcher(
            self._plan,
            self._run_group,
            self._finish,
            self.admission,
            concurrency=max(1, (ctx.recipe.engine.max_running * 2) // stage.group_size),
        )
        self.again: deque[GroupPlan] = deque()
        self.ordinal = 0
        self.recent: list[Group] = []
        self.busy_s = self.verified_s = 0.0
        self.own_tokens = 0
        self.syncing: asyncio.Task[None] | None = None
        self.saving: asyncio.Task[None] | None = None
        self.trained = 0
        self.why = ""

    async def run(self, start: Path) -> str:
        ctx, stage = self.ctx, self.stage
        first = await self._restore(start)
        await ctx.allot(ctx.division.shared_sampling, ctx.division.shared_training)
        await ctx.sync_weights()
        ctx.observer.stage(stage.name, stage.steps, "steps")
        ctx.observer.advance(first - 1, stage.steps)
        stats = await ctx.engine.stats()
        self.busy_s, self.own_tokens, self.verified_s = stats.busy_s, stats.own_tokens, ctx.verifying.seconds
        dispatching = asyncio.create_task(self._dispatch())
        try:
            await self._steps(first)
        finally:
            self.dispatcher.stop()
            pending = [task for task in (dispatching, self.syncing, self.saving) if task is not None]
            await asyncio.gather(*pending, return_exceptions=True)
        for group in ctx.ledger.open_groups(stage.name):
            ctx.ledger.drop_group(group.id, "stage_over")
        if self.trained >= stage.steps:
            return ""
        name = "RL" if stage.name == "rl" else f"RL ({stage.name})"
        why = self.why or "other steps found nothing to learn from"
        text = f"{name} ended after {self.trained} of {stage.steps} steps: {why}"
        ctx.ledger.event(ENDED_EARLY, stage=stage.name, text=text)
        return text

    async def _dispatch(self) -> None:
        try:
            await self.dispatcher.run()
        except BaseException as error:
            self.buffer.fail(error)
            raise

    async def _steps(self, first: int) -> None:
        ctx, stage = self.ctx, self.stage
        begun, starved = time.monotonic(), 0
        for step in range(first, stage.steps + 1):
            if stage.time_limit_s is not None and time.monotonic() - begun > stage.time_limit_s:
                self.why = "the time limit of the stage is reached"
                break
            waited = time.monotonic()
            filled = await self._take()
            waited = time.monotonic() - waited
            starved = starved + 1 if isinstance(filled, Starved) else 0
            if isinstance(filled, Starved):
                ctx.observer.note(
                    f"step {step}: {filled.refused} groups in a row taught nothing (every attempt had the "
                    "same reward); going on with what there is"
                )
                ctx.ledger.event("rl.starved", step=step, refused=filled.refused)
                if not filled.groups:
                    if starved >= stage.starved_steps:
                        self.why = self._why_starved()
                        break
                    self.why = f"{filled.refused} groups in a row taught nothing"
                    continue
            await self._step(step, filled.groups, waited)
            if len(filled.groups) < stage.groups_per_batch:  # the version rose, but fewer places came free
                self.dispatcher.release(len(filled.groups) - stage.groups_per_batch)
            if self.saving is not None and self.saving.done():
                await self._saved()
            if step % stage.checkpoint_every == 0 and step < stage.steps:
                await self._checkpoint(step)
        await self._synced()
        await self._saved()

    def _why_starved(self) -> str:
        """Say whether the tasks are too hard or too easy, and what to change."""
        members = [m.reward for group in self.recent for m in group.valid]
        solved = sum(isinstance(reward, Valid) and reward.passed for reward in members)
        rate = solved / max(1, len(members))
        if rate < 0.5:
            change = "The tasks are too hard for it: more SFT, easier tasks or larger groups"
        else:
            change = "It solves them: harder tasks"
        return f"attempts at one task all get the same reward ({rate:.0%} solved). {change}"

    async def _take(self) -> Filled | Starved:
        """Wait for a batch. The engine samples on all cores as long as the trainer has nothing to do."""
        ctx, count = self.ctx, self.stage.groups_per_batch
        if len(self.buffer) >= count:
            return await self.buffer.take(count)
        await ctx.allot(engine=ctx.division.sampling)
        filled = await self.buffer.take(count)
        await ctx.allot(engine=ctx.division.shared_sampling)
        return filled

    async def _step(self, step: int, groups: Sequence[Group], waited_s: float) -> None:
        ctx, stage = self.ctx, self.stage
        version = Version(ctx.ledger.incarnation, ctx.published)
        ctx.ledger.record_batch(stage.name, step, [group.id for group in groups], version)
        begun = time.monotonic()
        result = await self._apply(step, groups)
        trained_s = time.monotonic() - begun
        ctx.ledger.mark_trained(stage.name, step)
        self.trained += 1
        await self._synced()
        self.syncing = asyncio.create_task(self._put_in_force(step, await ctx.publish_weights()))
        stats, verified_s = await ctx.engine.stats(), ctx.verifying.seconds
        sampling_s = stats.busy_s - self.busy_s
        tokens_per_s = (stats.own_tokens - self.own_tokens) / sampling_s if sampling_s > 0 else 0.0
        finished, self.recent = self.recent, []
        values = {
            **{f"{stage.name}/{name}": value for name, value in result.items()},
            **group_metrics(stage.name, groups, finished, version),
            **{f"{stage.name}/weight/{name}": share for name, share in self.scheduler.weights().items()},
            "time/training_s": trained_s,
            "time/waiting_s": waited_s,
            "time/publish_s": time.monotonic() - begun - trained_s,
            f"{stage.name}/tokens_per_s": tokens_per_s,
            "time/sampling_s": sampling_s,
            "time/verifying_s": verified_s - self.verified_s,
        }
        self.busy_s, self.own_tokens, self.verified_s = stats.busy_s, stats.own_tokens, verified_s
        ctx.metrics.write(stage.name, step, values)
        ctx.observer.advance(
            step,
            stage.steps,
            reward=round(values.get(f"{stage.name}/reward", 0.0), 3),
            passed=f"{values.get(f'{stage.name}/pass', 0.0):.0%}",
            stale=round(values.get(f"{stage.name}/staleness", 0.0), 2),
            wait=f"{waited_s:.1f}s",
            train=f"{trained_s:.1f}s",
            sampled=f"{tokens_per_s:.0f} tok/s",
            **{
                name: f"{values[f'{stage.name}/pass/{name}']:.0%}"
                for name in ctx.domains
                if "/" in name and f"{stage.name}/pass/{name}" in values
            },
        )

    async def _put_in_force(self, step: int, manifest: Manifest) -> None:
        """The engine takes over the weights of ``step`` while the trainer goes on with the next one."""
        try:
            await self.ctx.put_in_force(manifest)
        except Exception as error:
            self.buffer.fail(error)  # no work would be admitted any more
            raise
        self.dispatcher.advance(step)

    async def _synced(self) -> None:
        if self.syncing is not None:
            await self.syncing
            self.syncing = None

    async def _apply(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        stage = self.stage
        samples = to_samples(groups, self.scales, stage.credit, stage.negative_weight)
        batch = Batch(step, "policy_gradient", samples)
        first = await self.ctx.trainer.step(batch)
        for _ in range(stage.passes - 1):
            await self.ctx.trainer.step(batch)
        return dict(first.metrics)

    async def _checkpoint(self, step: int) -> None:
        ctx, stage = self.ctx, self.stage
        ctx.folder.require_space()
        path = ctx.folder.checkpoint(stage.name, step)
        await self._saved()
        await ctx.trainer.save(path, resumable=True, background=True)
        self.saving = asyncio.create_task(self._record(step, path, {"scales": self.scales.state()}))

    async def _record(self, step: int, path: Path, state: dict[str, Any]) -> None:
        """Name the checkpoint in the ledger once it is there; until then a resume takes the one before."""
        await self.ctx.trainer.settle()
        previous = self.ctx.ledger.record_checkpoint(self.stage.name, step, path.name, state)
        if previous is not None and previous != path.name:
            self.ctx.folder.remove_checkpoint(previous)

    async def _saved(self) -> None:
        if self.saving is not None:
            await self.saving
            self.saving = None

    # ---- groups: drawn, run, finished, dropped

    def _plan(self) -> GroupPlan | None:
        if self.again:
            plan = self.again.popleft()
            self.ctx.ledger.start_group(plan.id)
            return plan
        draw = self.scheduler.draw()
        domain = self.ctx.domains[draw.domain]
        problem = domain.problem(draw.split, draw.index)
        self.ordinal += 1
        group_id = f"{self.stage.name}-{self.ordinal:05d}"
        self.ctx.ledger.draw_group(
            group_id,
            stage=self.stage.name,
            domain=draw.domain,
            task_id=problem.task.id,
            split=draw.split,
            index=draw.index,
            version=Version(self.ctx.ledger.incarnation, self.ctx.in_force),
            scheduler=self.scheduler.state(),
        )
        self.ctx.ledger.start_group(group_id)
        return self._group_plan(group_id, draw.domain, draw.index, 0)

    def _group_plan(self, group_id: str, domain_id: str, index: int, retry: int) -> GroupPlan:
        domain = self.ctx.domains[domain_id]
        return GroupPlan(
            group_id,
            domain,
            domain.problem("train", index),
            self.stage.group_size,
            Sampling(temperature=self.stage.temperature),
            self.ctx.recipe.seed,
            retry,
        )

    async def _run_group(self, plan: GroupPlan) -> Group:
        keep = partial(keep_trace, self.ctx, stage=self.stage.name, domain=plan.domain.card.id)
        return await self.ctx.runner.run(plan, keep)

    def _finish(self, group: Group) -> None:
        passed = sum(1 for m in group.valid if isinstance(m.reward, Valid) and m.reward.passed)
        seconds = sum(span.seconds for m in group.members for span in m.trace.spans)
        valid = len(group.valid)
        self.scheduler.record(Outcome(group.domain, passed, valid, len(group.members) - valid, seconds))
        self.ctx.ledger.complete_group(group.id, scheduler=self.scheduler.state())
        self.recent.append(group)
        self.buffer.put(group)

    def _drop(self, group: Group, reason: DropReason) -> None:
        self.ctx.ledger.drop_group(group.id, reason)
        self.dispatcher.release()

    # ---- resume

    async def _restore(self, start: Path) -> int:
        """Bring trainer, scheduler and buffer to where the record says. Returns the next step."""
        ctx, stage = self.ctx, self.stage
        view = ctx.ledger.resume_view(stage.name)
        checkpoint = view.checkpoint
        if checkpoint is None:
            await ctx.trainer.load(start, optimizer=False)
            await ctx.trainer.reset(stage.train)
        else:
            await ctx.trainer.reset(stage.train)
            await ctx.trainer.load(ctx.folder.require_checkpoint(stage.name, checkpoint.step), optimizer=True)
            self.scales = DomainScales.restore(checkpoint.state.get("scales", {}))
        if view.scheduler:
            self.scheduler.restore(view.scheduler)
        self.ordinal = view.drawn
        done = checkpoint.step if checkpoint else 0
        self.trained = len({batch.step for batch in view.batches})
        replay = [batch for batch in view.batches if batch.step > done]
        if replay:
            ctx.observer.stage(f"{stage.name} replay", len(replay), "steps")
        await ctx.allot(trainer=ctx.division.training)
        for number, batch in enumerate(replay, start=1):
            groups = [load_group(ctx, g.id, g.domain, g.task_id) for g in batch.groups]
            await self._apply(batch.step, groups)
            ctx.ledger.mark_trained(stage.name, batch.step, replay=True)
            ctx.observer.advance(number, len(replay))
            done = batch.step
        self._reopen(view, done)
        return done + 1

    def _reopen(self, view: ResumeView, done: int) -> None:
        ctx, stage = self.ctx, self.stage
        ready = [g for g in view.open_groups if g.state == "complete"]
        for group in view.open_groups:
            if group.state != "complete":
                ctx.ledger.reopen_group(group.id)
                self.again.append(self._group_plan(group.id, group.domain, group.index, group.retries + 1))
        trained = sum(len(batch.groups) for batch in view.batches)
        self.dispatcher.preload(started=trained + len(ready), version_n=done)
        for group in ready:
            self.buffer.put(load_group(ctx, group.id, group.domain, group.task_id))
        if view.open_groups or view.batches:
            ctx.observer.note(
                f"resumed {stage.name} at step {done + 1}: {trained} groups trained, {len(ready)} waiting, "
                f"{len(self.again)} start again"
            )
