"""The agent loop: one attempt at one task, from the first prompt to the evidence."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, replace

from lehr.core.clock import Clock, SystemClock
from lehr.core.episode import Evidence, Turn
from lehr.core.errors import DeadlineExceeded, Failure, LehrError, RoleLost
from lehr.core.task import Task
from lehr.core.trace import Sampling, Span, SpanName, StopReason, Trace, Usage
from lehr.domains.base import Environment
from lehr.engine.base import Engine
from lehr.model.base import Renderer
from lehr.rollout.assemble import SegmentBuilder
from lehr.sandbox.base import Boxes


@dataclass(frozen=True, slots=True)
class Attempt:
    """Which attempt at which task; ``seed`` fixes its random stream."""

    trace_id: str
    group_id: str
    number: int
    seed: int


class AgentLoop:
    """Runs episodes against an engine. Holds no state between them; safe to use concurrently.

    A failure of the engine, the box or the environment ends the episode with a failure in the trace: a
    bad rollout is data. Only the loss of a process of the run (:class:`RoleLost`) is raised.

    ``task.timeout_s`` bounds the time that the environment takes, over all turns; the time that a request
    waits for its turn in the engine is nobody's fault and has its own bound, ``engine_timeout_s``.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        boxes: Boxes,
        *,
        context_tokens: int,
        engine_timeout_s: float = 600.0,
        clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._boxes = boxes
        self._context_tokens = context_tokens
        self._engine_timeout_s = engine_timeout_s
        self._clock = clock or SystemClock()

    async def run(
        self, environment: Environment, task: Task, sampling: Sampling, attempt: Attempt
    ) -> tuple[Trace, Evidence]:
        """Return the trace and the evidence of one attempt."""
        sampling = replace(sampling, max_tokens=task.max_tokens, stop=task.stop)
        state = _Progress(SegmentBuilder(sampling), self._clock.now())
        failure: Failure | None = None
        evidence = Evidence(task.id, "", turns=0)
        try:
            evidence = await self._episode(environment, task, sampling, attempt, state)
        except TimeoutError as error:
            late = isinstance(error, DeadlineExceeded) and str(error)
            failure = Failure("deadline", late or f"the environment took more than {task.timeout_s:g} s")
        except RoleLost:
            raise
        except (LehrError, OSError, ValueError, RuntimeError, ExceptionGroup) as error:
            failure = Failure.of(error)
        segment = state.builder.build()
        trace = Trace(
            id=attempt.trace_id,
            task_id=task.id,
            group_id=attempt.group_id,
            attempt=attempt.number,
            segments=(segment,),
            stop=state.stop,
            spans=tuple(state.spans),
            usage=Usage(state.prompt_tokens, state.cached_tokens, int(segment.own.sum())),
            failure=failure,
        )
        if failure is not None:
            evidence = Evidence(task.id, "", turns=len(segment.turns), failure=failure)
        return trace, evidence

    async def _episode(
        self, environment: Environment, task: Task, sampling: Sampling, attempt: Attempt, state: _Progress
    ) -> Evidence:
        left_s = task.timeout_s
        opened = self._clock.now()
        async with asyncio.timeout(left_s):
            episode = await environment.open(task, self._boxes)
        left_s -= self._clock.now() - opened
        state.span("queue", opened, self._clock.now(), 0)
        try:
            state.builder.extend_to(self._renderer.start(task.messages, task.tools))
            for number in range(task.max_turns):
                room = self._context_tokens - len(state.builder.tokens)
                if room <= 0:
                    state.stop = "length"
                    break
                seeded = replace(
                    sampling,
                    max_tokens=min(sampling.max_tokens, room),
                    seed=derive_seed(attempt.seed, number),
                )
                begun = self._clock.now()
                completion = await self._engine.generate(
                    state.builder.tokens, seeded, session=attempt.trace_id, timeout_s=self._engine_timeout_s
                )
                state.span("generate", begun, self._clock.now(), number)
                state.prompt_tokens += len(state.builder.tokens)
                state.cached_tokens += completion.cached_tokens
                state.stop = completion.stop
                state.builder.append(completion)
                text = self._renderer.text([int(t) for t in completion.tokens])
                begun = self._clock.now()
                async with asyncio.timeout(left_s):
                    observation = await episode.step(Turn(text, truncated=completion.stop == "length"))
                left_s -= self._clock.now() - begun
                state.span("tool", begun, self._clock.now(), number)
                if observation.done or number + 1 == task.max_turns:
                    break
                state.builder.extend_to(self._renderer.extend(list(state.builder.tokens), observation.messages))
        finally:
            evidence = await asyncio.shield(episode.close())
        return evidence


class _Progress:
    def __init__(self, builder: SegmentBuilder, started: float) -> None:
        self.builder = builder
        self.started = started
        self.spans: list[Span] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.stop: StopReason = "abort"

    def span(self, name: SpanName, begun: float, ended: float, turn: int) -> None:
        self.spans.append(Span(name, begun - self.started, ended - begun, turn))


def derive_seed(seed: int, *path: int | str) -> int:
    """Return a non-negative 63-bit seed that is fixed by ``seed`` and ``path``."""
    text = "/".join(str(part) for part in (seed, *path)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
