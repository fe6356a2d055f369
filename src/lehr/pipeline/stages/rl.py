"""Asynchronous reinforcement learning: groups run while the trainer steps, bounded by admission.

Exactly once: a group is recorded before it runs, a batch before its step. After a crash, batches that
were recorded past the last checkpoint are applied again from their stored traces, finished groups return
to the buffer, and groups that were still running start again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lehr.core.batch import Manifest
from lehr.core.errors import Diverged
from lehr.core.reward import Valid
from lehr.core.trace import Sampling, Version
from lehr.ledger.rows import BatchRow, ReplayRow, ResumeView
from lehr.pipeline.context import Context
from lehr.pipeline.recipe import RlStage
from lehr.pipeline.records import ENDED_EARLY, keep_trace, load_group
from lehr.pipeline.replaying import Replaying
from lehr.pipeline.rewarding import RewardModel, open_rewarding
from lehr.pipeline.samples import teaches
from lehr.pipeline.stages.guard import Guard
from lehr.pipeline.stages.learner import Learner
from lehr.pipeline.stages.rl_metrics import dropped_metrics, group_metrics
from lehr.rollout.base import DropReason, Group
from lehr.rollout.buffer import Buffer, Filled, Starved
from lehr.rollout.dispatcher import Dispatcher
from lehr.rollout.group import GroupPlan
from lehr.schedule.admission import Admission
from lehr.schedule.base import Outcome
from lehr.schedule.scheduler import PassRateScheduler, SchedulerConfig

T = TypeVar("T")


async def run_rl(ctx: Context, stage: RlStage, start: Path) -> str:
    """Train from ``start``, or from the last checkpoint inside the stage when it is resumed.

    Returns a sentence where the stage ended early or trained less than it was to, else nothing.
    """
    from lehr.pipeline.stages.ppo import PpoRun, open_critic, open_reference

    scored, with_critic = stage.reward_model, stage.advantage == "gae"
    async with AsyncExitStack() as opened:
        async with asyncio.TaskGroup() as starting:

            def begin(enter: AbstractAsyncContextManager[T]) -> asyncio.Task[T]:
                return starting.create_task(opened.enter_async_context(enter))

            reward = begin(open_rewarding(ctx, scored, start)) if scored is not None else None
            critic = begin(open_critic(ctx, stage, start)) if with_critic else None
            compared = stage.needs_reference or (with_critic and stage.critic.kl > 0)
            reference = begin(open_reference(ctx, stage, start)) if compared else None
        known = reference.result() if reference is not None else None
        run = RlRun(ctx, stage) if critic is None else PpoRun(ctx, stage, critic.result(), known)
        run.learner.reference = known
        run.rewarding = reward.result() if reward is not None else None
        return await run.run(start)


def _counts(domains: Mapping[str, int]) -> str:
    """Return ``3 of a, 1 of b``."""
    return ", ".join(f"{count} of {name}" for name, count in sorted(domains.items(), key=lambda item: -item[1]))


class RlRun:
    """One start of a stage. Another stage that learns from groups overrides :meth:`apply` and
    :meth:`teaches`; one that trains more than the policy also :meth:`save_more` and :meth:`load_more`.
    """

    policy_alone = True
    """Whether a checkpoint holds the policy and nothing else, so that it can be written while steps go on."""

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
        self.learner = Learner(ctx.trainer, stage)
        self.guard = Guard(ctx.ledger, ctx.observer, stage.name, stage.alarms)
        self.replaying = Replaying(ctx, stage.name, stage.replay, self.learner.rule)
        self.step = 1
        self.rewarding: RewardModel | None = None
        self.buffer = Buffer(
            self._drop, refuse_limit=stage.refuse_batches * stage.groups_per_batch, teaches=self.teaches
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
        self.start = Path()
        self.saved = 0
        """The step of the last checkpoint inside the stage, 0 without one."""

    async def run(self, start: Path) -> str:
        """See :func:`run_rl`."""
        ctx, stage, self.start = self.ctx, self.stage, start
        first = await self._restore(start)
        await ctx.allot(ctx.division.shared_sampling, ctx.division.shared_training)
        try:
            await ctx.sync_weights()
        except Diverged as error:  # a run that ended before it could go back
            if first == 1:
                raise
            self.why = self.guard.not_finite(first - 1, error)
        ctx.observer.stage(stage.name, stage.steps, "steps")
        ctx.observer.advance(first - 1, stage.steps)
        stats = await ctx.engine.stats()
        self.busy_s, self.own_tokens, self.verified_s = stats.busy_s, stats.own_tokens, ctx.verifying.seconds
        dispatching = asyncio.create_task(self._dispatch())
        try:
            if self.why:
                await self._go_back()
            else:
                await self._steps(first)
        finally:
            self.dispatcher.stop()
            pending = [task for task in (dispatching, self.syncing, self.saving) if task is not None]
            await asyncio.gather(*pending, return_exceptions=True)
        for group in ctx.ledger.open_groups(stage.name):
            ctx.ledger.drop_group(group.id, "stage_over")
        if self.trained >= stage.steps and not self.why:
            return ""
        name = "RL" if stage.name == "rl" else stage.name
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
            self.step = step
            waited = time.monotonic()
            filled = await self._take()
            waited = time.monotonic() - waited
            starved = starved + 1 if isinstance(filled, Starved) else 0
            if isinstance(filled, Starved):
                ctx.observer.note(
                    f"step {step}: {filled.refused} groups in a row taught nothing (every attempt had the "
                    f"same reward): {_counts(filled.domains)}; going on with what there is"
                )
                ctx.ledger.event("rl.starved", step=step, refused=filled.refused, domains=dict(filled.domains))
                if not filled.groups:
                    if starved >= stage.starved_steps:
                        self.why = self._why_starved()
                        break
                    self.why = f"{filled.refused} groups in a row taught nothing"
                    continue
            if diverged := await self._step(step, filled.groups, waited):
                self.why = diverged
                await self._synced()
                return await self._go_back()
            if len(filled.groups) < stage.groups_per_batch:  # the version rose, but fewer places came free
                self.dispatcher.release(len(filled.groups) - stage.groups_per_batch)
            if self.saving is not None and self.saving.done():
                await self._saved()
            if step % stage.checkpoint_every == 0 and step < stage.steps and not self.guard.suspicious:
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

    async def _go_back(self) -> None:
        """Load the last good weights: what came after them has diverged. Completes ``why`` with which they
        are.
        """
        await self._saved()
        ctx, stage = self.ctx, self.stage
        path = ctx.folder.require_checkpoint(stage.name, self.saved) if self.saved else self.start
        await ctx.trainer.load(path, optimizer=False)
        await self.load_more(path if self.saved else None)
        where = f"of step {self.saved}" if self.saved else "that it started from"
        self.why = f"it diverged ({self.why}). The weights are those {where}"

    async def _step(self, step: int, groups: Sequence[Group], waited_s: float) -> str:
        """Take a step. Returns why the run has diverged, or nothing."""
        ctx, stage = self.ctx, self.stage
        version = Version(ctx.ledger.incarnation, ctx.published)
        replays = self.replaying.draw(step, self.scheduler.rates(), self.learner.scales)
        ctx.ledger.record_batch(stage.name, step, [group.id for group in groups], version, replays)
        begun = time.monotonic()
        result, diverged = await self.guard.watch(step, self.apply(step, groups, replays))
        trained_s = time.monotonic() - begun
        ctx.ledger.mark_trained(stage.name, step)
        if not result:
            return diverged
        self.replaying.learn(step, groups, replays)
        self.trained += 1
        await self._synced()
        try:
            manifest = await ctx.publish_weights()
        except Diverged as error:
            return self.guard.not_finite(step, error)
        self.syncing = asyncio.create_task(self._put_in_force(step, manifest))
        stats, verified_s = await ctx.engine.stats(), ctx.verifying.seconds
        sampling_s = stats.busy_s - self.busy_s
        tokens_per_s = (stats.own_tokens - self.own_tokens) / sampling_s if sampling_s > 0 else 0.0
        finished, self.recent = self.recent, []
        values = {
            **{f"{stage.name}/{name}": value for name, value in result.items()},
            **group_metrics(stage.name, groups, finished, version),
            **dropped_metrics(stage.name, self.buffer.take_dropped()),
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
        return diverged

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

    def teaches(self, group: Group) -> DropReason | None:
        """Return why a finished group is dropped, or None where it is trained on."""
        return teaches(group, self.learner.rule)

    async def save_more(self, path: Path) -> None:
        """Save what else the run needs into a checkpoint, before it is recorded."""

    async def load_more(self, path: Path | None) -> None:
        """Take that over from a checkpoint, or begin, where there is none yet."""

    async def apply(
        self, step: int, groups: Sequence[Group], replays: Sequence[ReplayRow] = ()
    ) -> dict[str, float]:
        """Take the step of a batch and return what the trainer reports of it."""
        metrics = await self.learner.apply(step, groups, self.replaying.samples(replays))
        return {**metrics, "replayed": float(len(replays))}

    async def _checkpoint(self, step: int) -> None:
        ctx, stage = self.ctx, self.stage
        ctx.folder.require_space()
        path = ctx.folder.checkpoint(stage.name, step)
        await self._saved()
        await ctx.trainer.save(path, resumable=True, background=self.policy_alone)
        await self.save_more(path)
        state = self.learner.state() | self.guard.state() | {"replay": self.replaying.state()}
        self.saving = asyncio.create_task(self._record(step, path, state))

    async def _record(self, step: int, path: Path, state: dict[str, Any]) -> None:
        """Name the checkpoint in the ledger once it is there; until then a resume takes the one before."""
        await self.ctx.trainer.settle()
        previous = self.ctx.ledger.record_checkpoint(self.stage.name, step, path.name, state)
        if previous is not None and previous != path.name:
            self.ctx.folder.remove_checkpoint(previous)
        self.saved = step

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
            None if self.stage.length is None else self.stage.length.limit(self.step),
        )

    async def _run_group(self, plan: GroupPlan) -> Group:
        keep = partial(keep_trace, self.ctx, stage=self.stage.name, domain=plan.domain.card.id)
        if self.rewarding is None:
            return await self.ctx.runner.run(plan, keep)
        group = await self.rewarding.rewarded(await self.ctx.runner.run(plan), plan.problem.task)
        for member in group.members:
            keep(member)
        return group

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
        settings = stage.train.within(stage.steps * stage.passes)
        if checkpoint is None:
            await ctx.trainer.load(start, optimizer=False)
            await ctx.trainer.reset(settings)
            await self.load_more(None)
        else:
            await ctx.trainer.reset(settings)
            path = ctx.folder.require_checkpoint(stage.name, checkpoint.step)
            await ctx.trainer.load(path, optimizer=True)
            await self.load_more(path)
            self.learner.restore(checkpoint.state)
            self.guard.restore(checkpoint.state)
            self.replaying.restore(checkpoint.state.get("replay", []))
            self.saved = checkpoint.step
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
            groups = self._groups(batch)
            _, self.why = await self.guard.watch(batch.step, self.apply(batch.step, groups, batch.replays))
            ctx.ledger.mark_trained(stage.name, batch.step, replay=True)
            if self.why:
                break
            self.replaying.learn(batch.step, groups, batch.replays)
            ctx.observer.advance(number, len(replay))
            done = batch.step
        self.step = done + 1
        self._reopen(view, done)
        return done + 1

    def _groups(self, batch: BatchRow) -> list[Group]:
        return [load_group(self.ctx, g.id, g.domain, g.task_id) for g in batch.groups]

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
