"""The agent loop for a model that is asked in messages: one attempt at one task, without tokens.

Its traces have no segment. They can be judged and counted; nothing can be trained on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from lehr.core.clock import Clock, SystemClock
from lehr.core.completer import Completer, NoAccess
from lehr.core.episode import Evidence, Turn
from lehr.core.errors import ConfigError, DeadlineExceeded, Failure, LehrError, RoleLost
from lehr.core.task import Message, Task
from lehr.core.trace import Sampling, Span, SpanName, StopReason, Trace, Usage
from lehr.domains.base import Environment
from lehr.rollout.agent import Attempt, derive_seed
from lehr.sandbox.base import Boxes


@dataclass(slots=True)
class _Progress:
    started: float
    spans: list[Span] = field(default_factory=list[Span])
    usage: Usage = field(default_factory=Usage)
    stop: StopReason = "abort"
    turns: int = 0
    said: list[Message] = field(default_factory=list[Message])

    def add(self, usage: Usage) -> None:
        u = self.usage
        self.usage = Usage(
            u.prompt_tokens + usage.prompt_tokens,
            u.cached_tokens + usage.cached_tokens,
            u.own_tokens + usage.own_tokens,
        )


class ChatLoop:
    """Runs episodes against a completer, as ``agent.AgentLoop`` does against an engine.

    A failure ends the episode with a failure in the trace. Only what would end every other one as well is
    raised: the loss of a process (:class:`RoleLost`), and a model that cannot be used (:class:`NoAccess`).

    heard: called with the id of each trace that did not fail and all that was said in it, the task's messages
    first.
    """

    def __init__(
        self,
        completer: Completer,
        boxes: Boxes,
        *,
        heard: Callable[[str, Sequence[Message]], object] | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._heard = heard
        self._completer = completer
        self._boxes = boxes
        self._clock = clock or SystemClock()

    async def run(
        self, environment: Environment, task: Task, sampling: Sampling, attempt: Attempt
    ) -> tuple[Trace, Evidence]:
        """Return the trace and the evidence of one attempt."""
        sampling = replace(sampling, max_tokens=task.max_tokens, stop=task.stop)
        state = _Progress(self._clock.now())
        failure: Failure | None = None
        evidence = Evidence(task.id, "", turns=0)
        try:
            evidence = await self._episode(environment, task, sampling, attempt, state)
        except TimeoutError as error:
            late = isinstance(error, DeadlineExceeded) and str(error)
            failure = Failure("deadline", late or f"the environment took more than {task.timeout_s:g} s")
        except (RoleLost, NoAccess):
            raise
        except (LehrError, OSError, ValueError, RuntimeError, ExceptionGroup) as error:
            failure = Failure.of(error)
        if failure is not None:
            evidence = Evidence(task.id, "", turns=state.turns, failure=failure)
        elif self._heard is not None:
            self._heard(attempt.trace_id, state.said)
        trace = Trace(
            id=attempt.trace_id,
            task_id=task.id,
            group_id=attempt.group_id,
            attempt=attempt.number,
            segments=(),
            stop=state.stop,
            spans=tuple(state.spans),
            usage=state.usage,
            failure=failure,
        )
        return trace, evidence

    async def _episode(
        self, environment: Environment, task: Task, sampling: Sampling, attempt: Attempt, state: _Progress
    ) -> Evidence:
        if task.tools:
            raise ConfigError(
                f"{task.id} offers tools, which a model behind an API is not shown yet",
                expected="a task whose answers are text",
            )
        left_s = task.timeout_s
        opened = self._clock.now()
        async with asyncio.timeout(left_s):
            episode = await environment.open(task, self._boxes)
        left_s -= self._clock.now() - opened
        self._span(state, "queue", opened, 0)
        said = state.said
        said += task.messages
        try:
            for number in range(task.max_turns):
                seed = derive_seed(attempt.seed, number) if sampling.temperature else None
                begun = self._clock.now()
                answer = await self._completer.complete(said, replace(sampling, seed=seed))
                self._span(state, "generate", begun, number)
                state.add(answer.usage)
                state.stop = "length" if answer.stop == "length" else "stop"
                state.turns += 1
                said.append(Message(role="assistant", content=answer.text))
                begun = self._clock.now()
                async with asyncio.timeout(left_s):
                    observation = await episode.step(Turn(answer.text, truncated=answer.stop == "length"))
                left_s -= self._clock.now() - begun
                self._span(state, "tool", begun, number)
                if observation.done:
                    break
                said += observation.messages
        finally:
            evidence = await asyncio.shield(episode.close())
        return evidence

    def _span(self, state: _Progress, name: SpanName, begun: float, turn: int) -> None:
        state.spans.append(Span(name, begun - state.started, self._clock.now() - begun, turn))
