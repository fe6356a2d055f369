import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from lehr.core.episode import Evidence, Observation, Turn
from lehr.core.errors import LehrError, RoleLost
from lehr.core.task import Message, Task
from lehr.core.trace import Completion, Sampling
from lehr.engine.base import EngineError
from lehr.model.chat import ChatRenderer
from lehr.model.tokenizer import ByteTokenizer
from lehr.rollout.agent import AgentLoop, Attempt, derive_seed

TOKENIZER = ByteTokenizer()
RENDERER = ChatRenderer(TOKENIZER)


class Scripted:
    """An engine that says what it is told, and remembers what it was sent."""

    def __init__(self, *answers: str | LehrError) -> None:
        self.answers = list(answers)
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, *, session: str = "", timeout_s: float = 600.0
    ) -> Completion:
        self.prompts.append(list(tokens))
        self.samplings.append(sampling)
        answer = self.answers.pop(0)
        if isinstance(answer, LehrError):
            raise answer
        ids = np.array([*TOKENIZER.encode(answer), TOKENIZER.IM_END], np.int32)
        shape = len(ids)
        logprobs = np.linspace(-2, -1, shape, dtype=np.float32)
        return Completion(
            ids, logprobs, logprobs - 1, np.ones(shape, np.float32), np.full(shape, 7), "eos", cached_tokens=3
        )


class Echo:
    """An environment that answers each turn with its length and ends on DONE."""

    def __init__(self, *, break_on: str = "") -> None:
        self.turns: list[str] = []
        self.closed = 0
        self.break_on = break_on

    async def open(self, task: Task, boxes: object) -> "Echo":
        return self

    async def step(self, turn: Turn) -> Observation:
        self.turns.append(turn.text)
        if turn.text == self.break_on:
            raise RuntimeError("the environment broke")
        said = (Message(role="tool", content=f"len {len(turn.text)}"),)
        return Observation(said, done=turn.text == "DONE")

    async def close(self) -> Evidence:
        self.closed += 1
        return Evidence("t", self.turns[-1] if self.turns else "", turns=len(self.turns))


def task(turns: int = 3, timeout_s: float = 5.0) -> Task:
    message = Message(role="user", content="say something")
    return Task(id="t", domain="d", messages=(message,), max_turns=turns, max_tokens=20, timeout_s=timeout_s)


def run(engine: Scripted, world: Echo, *, turns: int = 3, context: int = 4096, timeout_s: float = 5.0):
    loop = AgentLoop(engine, RENDERER, None, context_tokens=context)  # type: ignore[arg-type]
    attempt = Attempt("g-0", "g", 0, seed=1)
    return asyncio.run(loop.run(world, task(turns, timeout_s), Sampling(temperature=0.7), attempt))  # type: ignore[arg-type]


def test_r18_the_trained_ids_are_the_ids_that_were_sent_and_sampled():
    engine, world = Scripted("first", "DONE"), Echo()
    trace, evidence = run(engine, world)
    (segment,) = trace.segments
    assert list(segment.tokens[: len(engine.prompts[1])]) == engine.prompts[1]
    assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0]
    own = [int(t) for t in segment.tokens[segment.own]]
    assert own == [*b"first", TOKENIZER.IM_END, *b"DONE", TOKENIZER.IM_END]
    assert evidence.answer == "DONE"
    assert trace.failure is None


def test_what_is_not_own_carries_no_logprob_and_no_version():
    trace, _ = run(Scripted("first", "DONE"), Echo())
    (segment,) = trace.segments
    assert (segment.versions[segment.own] == 7).all()
    assert (segment.versions[~segment.own] == -1).all()
    assert (segment.logprobs[~segment.own] == 0).all()
    assert (segment.logprobs[segment.own] < 0).all()
    assert [int(segment.own[i - 1]) for i in segment.turns] == [0, 0]
    assert all(segment.own[i] for i in segment.turns)
    assert trace.usage.own_tokens == int(segment.own.sum())
    assert trace.usage.cached_tokens == 6


def test_the_episode_ends_at_its_last_turn_and_is_closed_once():
    engine, world = Scripted("a", "b"), Echo()
    trace, evidence = run(engine, world, turns=2)
    assert (evidence.turns, world.closed, len(trace.segments[0].turns)) == (2, 1, 2)


def test_r17_an_engine_failure_is_data_with_what_was_sampled_before():
    world = Echo()
    trace, evidence = run(Scripted("first", EngineError("no blocks")), world)
    assert trace.failure is not None
    assert trace.failure.code == "engine"
    assert evidence.failure == trace.failure
    assert trace.segments[0].own.any()
    assert world.closed == 1


def test_r17_an_environment_failure_is_data():
    trace, _ = run(Scripted("boom"), Echo(break_on="boom"))
    assert trace.failure is not None
    assert "the environment broke" in trace.failure.detail


def test_the_loss_of_a_process_is_not_swallowed():
    with pytest.raises(RoleLost):
        run(Scripted(RoleLost("engine ended")), Echo())


def test_r23_an_environment_that_hangs_ends_inside_the_deadline():
    class Hang(Echo):
        async def step(self, turn: Turn) -> Observation:
            await asyncio.sleep(60)
            raise RuntimeError("unreachable")

    world = Hang()
    trace, _ = run(Scripted("a"), world, timeout_s=0.05)
    assert trace.failure is not None
    assert trace.failure.code == "deadline"
    assert world.closed == 1


def test_v20_time_in_the_engines_queue_is_not_the_candidates():
    class Busy(Scripted):
        async def generate(self, *args: object, **kwargs: object) -> Completion:
            await asyncio.sleep(0.1)
            return await super().generate(*args, **kwargs)  # type: ignore[arg-type]

    trace, evidence = run(Busy("DONE"), Echo(), timeout_s=0.05)
    assert trace.failure is None
    assert evidence.answer == "DONE"


def test_a_full_context_ends_the_episode_without_a_request():
    engine = Scripted("a")
    trace, _ = run(engine, Echo(), context=5)
    assert engine.prompts == []
    assert trace.stop == "length"


def test_each_turn_and_each_attempt_has_its_own_seed():
    engine = Scripted("a", "b")
    run(engine, Echo(), turns=2)
    assert engine.samplings[0].seed != engine.samplings[1].seed
    assert engine.samplings[0].temperature == 0.7
    assert engine.samplings[0].max_tokens == 20
    assert derive_seed(1, "g", 0) == derive_seed(1, "g", 0) != derive_seed(2, "g", 0)
