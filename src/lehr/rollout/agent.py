"""The agent loop: one attempt at one task, from the first prompt to the evidence."""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, replace

from lehr.core.clock import Clock, SystemClock
from lehr.core.episode import Evidence, Turn
from lehr.core.errors import DeadlineExceeded, Failure, LehrError, RoleLost
from lehr.core.task import Message, Task
from lehr.core.trace import (
    Completion,
    Compression,
    Sampling,
    Segment,
    Span,
    SpanName,
    StopReason,
    Trace,
    Usage,
)
from lehr.domains.base import Environment
from lehr.engine.base import Engine
from lehr.model.base import Renderer
from lehr.rollout.assemble import SegmentBuilder
from lehr.rollout.compress import (
    SUMMARY_REQUEST,
    CompressionConfig,
    Exchange,
    assemble,
    choose,
    limit_of,
)
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

    compression: what becomes of conversations that outgrow the context; without it they end there.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        boxes: Boxes,
        *,
        context_tokens: int,
        compression: CompressionConfig | None = None,
        engine_timeout_s: float = 600.0,
        clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._boxes = boxes
        self._context_tokens = context_tokens
        self._compression = compression
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
        segments = (*state.segments, state.builder.build())
        trace = Trace(
            id=attempt.trace_id,
            task_id=task.id,
            group_id=attempt.group_id,
            attempt=attempt.number,
            segments=segments,
            stop=state.stop,
            spans=tuple(state.spans),
            usage=Usage(state.prompt_tokens, state.cached_tokens, sum(int(s.own.sum()) for s in segments)),
            failure=failure,
            compressions=tuple(state.compressions),
        )
        if failure is not None:
            evidence = Evidence(task.id, "", turns=len(state.exchanges), failure=failure)
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
                completion, text = await self._generate(seeded, attempt, state, number)
                state.stop = completion.stop
                begun = self._clock.now()
                async with asyncio.timeout(left_s):
                    observation = await episode.step(Turn(text, truncated=completion.stop == "length"))
                left_s -= self._clock.now() - begun
                state.span("tool", begun, self._clock.now(), number)
                state.exchanges.append(Exchange(text, observation.messages, observation.check))
                if observation.done or number + 1 == task.max_turns:
                    break
                await self._go_on(task, sampling, attempt, state, number)
        finally:
            evidence = await asyncio.shield(episode.close())
        return evidence

    async def _generate(
        self, sampling: Sampling, attempt: Attempt, state: _Progress, number: int
    ) -> tuple[Completion, str]:
        begun = self._clock.now()
        completion = await self._engine.generate(
            state.builder.tokens, sampling, session=attempt.trace_id, timeout_s=self._engine_timeout_s
        )
        state.span("generate", begun, self._clock.now(), number)
        state.prompt_tokens += len(state.builder.tokens)
        state.cached_tokens += completion.cached_tokens
        state.builder.append(completion)
        return completion, self._renderer.text([int(t) for t in completion.tokens])

    async def _go_on(
        self, task: Task, sampling: Sampling, attempt: Attempt, state: _Progress, number: int
    ) -> None:
        """Append what the environment answered to turn ``number``; where that is too long, begin a new
        segment.
        """
        answered = state.exchanges[-1].answered
        grown = self._renderer.extend(list(state.builder.tokens), answered)
        config = self._compression
        if config is not None:
            limit = limit_of(config, context_tokens=self._context_tokens, max_tokens=sampling.max_tokens)
            kept = None
            if len(grown) > limit:
                kept = choose(
                    task.messages, task.tools, state.exchanges, config, self._renderer, limit, len(grown)
                )
            if kept is not None:
                summary, seed = await self._sum_up(config, sampling, attempt, state, number)
                messages = assemble(task.messages, state.exchanges, kept, summary)
                tokens = self._renderer.start(messages, task.tools)
                left_out = len(state.exchanges) - len(kept)
                state.new_segment(sampling, tokens, number + 1, left_out, len(grown), seed)
                return
        state.builder.extend_to(grown)

    async def _sum_up(
        self, config: CompressionConfig, sampling: Sampling, attempt: Attempt, state: _Progress, number: int
    ) -> tuple[str, int | None]:
        """Let the model write down, as one more turn of the old segment, what to remember. Returns that and the
        seed it was drawn with; nothing where no summary is wanted, or no room for it is left.
        """
        if not config.summary_tokens:
            return "", None
        request = Message(role="user", content=SUMMARY_REQUEST)
        asked = self._renderer.extend(list(state.builder.tokens), (*state.exchanges[-1].answered, request))
        if len(asked) + config.summary_tokens > self._context_tokens:
            return "", None
        state.builder.extend_to(asked)
        seed = derive_seed(attempt.seed, "summary", len(state.compressions))
        seeded = replace(sampling, max_tokens=config.summary_tokens, seed=seed)
        _, text = await self._generate(seeded, attempt, state, number)
        return text, seed


class _Progress:
    def __init__(self, builder: SegmentBuilder, started: float) -> None:
        self.builder = builder
        self.started = started
        self.spans: list[Span] = []
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.stop: StopReason = "abort"
        self.segments: list[Segment] = []
        self.exchanges: list[Exchange] = []
        self.compressions: list[Compression] = []

    def new_segment(
        self, sampling: Sampling, tokens: list[int], turn: int, left_out: int, before: int, seed: int | None
    ) -> None:
        """End the segment that grew so far, and begin one with the prompt ``tokens``."""
        self.segments.append(self.builder.build())
        self.compressions.append(Compression(len(self.segments), turn, left_out, before, len(tokens), seed))
        self.builder = SegmentBuilder(sampling)
        self.builder.extend_to(tokens)

    def span(self, name: SpanName, begun: float, ended: float, turn: int) -> None:
        self.spans.append(Span(name, begun - self.started, ended - begun, turn))


def derive_seed(seed: int, *path: int | str) -> int:
    """Return a non-negative 63-bit seed that is fixed by ``seed`` and ``path``."""
    text = "/".join(str(part) for part in (seed, *path)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
