"""Runs the attempts of one group and judges each of them by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

from lehr.core.clock import Clock, SystemClock
from lehr.core.episode import Evidence
from lehr.core.reward import Invalid, Reward
from lehr.core.task import Problem, Task
from lehr.core.trace import Sampling, Span, Trace
from lehr.domains.base import Environment
from lehr.domains.catalogue import Domain
from lehr.rollout.agent import Attempt, derive_seed
from lehr.rollout.base import Group, Judged
from lehr.sandbox.base import Boxes
from lehr.sandbox.lease import on_behalf_of
from lehr.verify.compose import judge

ENGINE_CODES = frozenset({"answer", "engine", "engine_broken", "request_too_large"})
"""Failures that are neither the task's nor its environment's."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """A group that is about to run. ``seed`` and ``id`` fix every random stream in it.

    max_tokens: a limit on each completion, where it is lower than the task's own.
    retry: counts how often the group was started before (a run that was killed starts open groups again).
    """

    id: str
    domain: Domain
    problem: Problem
    size: int
    sampling: Sampling
    seed: int
    retry: int = 0
    max_tokens: int | None = None


class Loop(Protocol):
    """Makes one attempt: :class:`lehr.rollout.agent.AgentLoop`, or :class:`lehr.rollout.chat.ChatLoop`."""

    async def run(
        self, environment: Environment, task: Task, sampling: Sampling, attempt: Attempt
    ) -> tuple[Trace, Evidence]:
        """Return the trace and the evidence of one attempt."""
        ...


class GroupRunner:
    """Runs groups: attempts side by side, each judged in fresh boxes as soon as it ends.

    ``meter`` is entered around every judgement, to count the time that judging takes.
    """

    def __init__(
        self,
        agent: Loop,
        boxes: Boxes,
        *,
        judge_timeout_s: float = 60.0,
        meter: Callable[[], AbstractContextManager[None]] = nullcontext,
        clock: Clock | None = None,
    ) -> None:
        self._agent = agent
        self._boxes = boxes
        self._judge_timeout_s = judge_timeout_s
        self._meter = meter
        self._clock = clock or SystemClock()

    async def run(self, plan: GroupPlan, on_judged: Callable[[Judged], object] | None = None) -> Group:
        """Return the finished group. ``on_judged`` sees each member as soon as it is judged."""

        async def member(number: int) -> Judged:
            judged = await self._attempt(plan, number)
            if on_judged is not None:
                on_judged(judged)
            return judged

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(member(number)) for number in range(plan.size)]
        members = tuple(task.result() for task in running)
        return Group(plan.id, plan.domain.card.id, plan.problem.task.id, members)

    async def _attempt(self, plan: GroupPlan, number: int) -> Judged:
        suffix = f"-r{plan.retry}" if plan.retry else ""
        attempt = Attempt(
            f"{plan.id}-{number}{suffix}", plan.id, number, derive_seed(plan.seed, plan.id, number)
        )
        task, card = plan.problem.task, plan.domain.card
        if plan.max_tokens is not None:
            task = task.model_copy(update={"max_tokens": min(task.max_tokens, plan.max_tokens)})
        with on_behalf_of(task=task.id, attempt=attempt.trace_id, phase="attempt"):
            trace, evidence = await self._agent.run(plan.domain.environment(), task, plan.sampling, attempt)
        if trace.failure is not None:
            reason = "engine" if trace.failure.code in ENGINE_CODES else "environment"
            return Judged(trace, Invalid(reason, trace.failure.detail))
        begun = self._clock.now()
        with self._meter(), on_behalf_of(task=task.id, attempt=attempt.trace_id, phase="verify"):
            reward: Reward = await judge(
                task,
                evidence,
                plan.problem.gold,
                self._boxes,
                terms=card.reward,
                reward_range=card.reward_range,
                pass_at=card.pass_at,
                timeout_s=self._judge_timeout_s,
            )
        last = trace.spans[-1] if trace.spans else None
        start = last.start_s + last.seconds if last else 0.0
        span = Span("verify", start, self._clock.now() - begun, max(0, evidence.turns - 1))
        return Judged(replace(trace, spans=(*trace.spans, span)), reward)
