"""Turns the terms of a task's reward into one typed reward.

Every term is judged by its own verifier in its own fresh box, side by side. A term that could not be
judged makes the whole reward ``Invalid``: it is never counted as zero and never left out of the mean.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from lehr.core.episode import Evidence
from lehr.core.errors import DeadlineExceeded, LehrError
from lehr.core.reward import Invalid, Reward, checked
from lehr.core.task import Gold, RewardTerm, Task
from lehr.sandbox.base import Box, Boxes, Snapshot, Spec
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.setups import Setup
from lehr.verify import verifiers as _builtin
from lehr.verify.base import VERIFIERS, NoScore, Score, Verifier

QUEUE_S = 300.0
"""Longest wait in line for a box of a verifier."""

_builtin.register(VERIFIERS)


async def judge(
    task: Task,
    evidence: Evidence,
    gold: Gold,
    boxes: Boxes,
    *,
    terms: Sequence[RewardTerm] = (),
    reward_range: tuple[float, float] = (0.0, 1.0),
    pass_at: float = 0.999,
    timeout_s: float = 60.0,
) -> Reward:
    """Return what the evidence was worth: the mean of the terms, weighted, normalised by all weights.

    terms: those of the task where empty. A failed gate (below 1) makes the value the low end of the range.
    The mean is mapped onto ``reward_range``. Never raises for what a verifier or a box did; raises
    ``UnknownName`` for a verifier that does not exist, and ``asyncio.CancelledError`` when cancelled.
    """
    terms = tuple(terms) or task.reward
    if not terms:
        return Invalid("verifier_crash", f"{task.id} has no reward terms")
    called = [(term, VERIFIERS.get(term.verifier)) for term in terms]
    if evidence.failure is not None:
        return Invalid("environment", f"{evidence.failure.code}: {evidence.failure.detail}")
    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(_judge_term(term, verifier, task, evidence, gold, boxes, timeout_s))
            for term, verifier in called
        ]
    scores = [judged.result() for judged in running]
    for (term, _), score in zip(called, scores, strict=True):
        if isinstance(score, NoScore):
            return Invalid(score.reason, f"{term.verifier}: {score.detail}")
    judged_terms = [(t, s) for t, s in zip(terms, scores, strict=True) if isinstance(s, Score)]
    return _combine(judged_terms, reward_range, pass_at)


def _combine(
    judged: Sequence[tuple[RewardTerm, Score]], reward_range: tuple[float, float], pass_at: float
) -> Reward:
    low, high = reward_range
    parts: dict[str, float] = {}
    for term, score in judged:
        refused = checked(score.value, 0.0, 1.0, parts={}, passed=False)
        if isinstance(refused, Invalid):
            return Invalid(refused.reason, f"{term.verifier}: {refused.detail}")
        name, count = term.verifier, 2
        while name in parts:
            name, count = f"{term.verifier}#{count}", count + 1
        parts[name] = score.value
    total = sum(term.weight for term, _ in judged)
    mean = sum(term.weight * score.value for term, score in judged) / total
    if any(term.gate and score.value < 1.0 for term, score in judged):
        mean = 0.0
    value = low + (high - low) * mean
    return checked(value, low, high, parts=parts, passed=value >= pass_at)


class _Clocked:
    """Boxes whose waiting line does not count against a verifier's deadline: queue time is nobody's fault.

    They count on the quota of the domain whose answer is judged.
    """

    def __init__(self, boxes: Boxes, timer: asyncio.Timeout, domain: str) -> None:
        self._boxes = boxes
        self._domain = domain
        self._timer = timer

    @asynccontextmanager
    async def lease(
        self,
        spec: Spec,
        *,
        timeout_s: float = QUEUE_S,
        snapshot: Snapshot | None = None,
        domain: str = "",
    ) -> AsyncGenerator[Box, None]:
        box = await self.acquire(spec, timeout_s=timeout_s, snapshot=snapshot, domain=domain)
        try:
            yield box
        finally:
            await self.release(box)

    async def acquire(
        self,
        spec: Spec,
        *,
        timeout_s: float = QUEUE_S,
        snapshot: Snapshot | None = None,
        domain: str = "",
    ) -> Box:
        async with self._stopped():
            return await self._boxes.acquire(
                spec, timeout_s=timeout_s, snapshot=snapshot, domain=domain or self._domain
            )

    async def release(self, box: Box) -> None:
        await self._boxes.release(box)

    @asynccontextmanager
    async def prepared(self, spec: Spec, setup: Setup) -> AsyncGenerator[Snapshot, None]:
        """Nor does the time count that a set-up takes, which the first of many waits for."""
        async with AsyncExitStack() as held:
            async with self._stopped():
                snapshot = await held.enter_async_context(self._boxes.prepared(spec, setup))
            yield snapshot

    @asynccontextmanager
    async def _stopped(self) -> AsyncGenerator[None, None]:
        loop = asyncio.get_running_loop()
        left = (self._timer.when() or loop.time()) - loop.time()
        self._timer.reschedule(None)
        try:
            yield
        finally:
            self._timer.reschedule(loop.time() + left)


async def _judge_term(
    term: RewardTerm,
    verifier: Verifier,
    task: Task,
    evidence: Evidence,
    gold: Gold,
    boxes: Boxes,
    timeout_s: float,
) -> Score | NoScore:
    """The boundary at which a failing verifier becomes data."""
    try:
        async with asyncio.timeout(timeout_s) as timer:
            return await verifier(task, evidence, gold, _Clocked(boxes, timer, task.domain))
    except DeadlineExceeded as error:
        return NoScore("sandbox", str(error))
    except TimeoutError:
        return NoScore("verifier_timeout", f"no verdict within {timeout_s:g} s")
    except SandboxError as error:
        return NoScore("sandbox", str(error))
    except LehrError as error:
        return NoScore("verifier_crash", str(error))
    except Exception as error:
        return NoScore("verifier_crash", f"{type(error).__name__}: {error}")
