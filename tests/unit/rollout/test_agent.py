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
from lehr.rollout.compress import CompressionConfig

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


class Long(Echo):
    """Answers at length; what it says of a turn that begins with ``test`` tells how a check went."""

    async def step(self, turn: Turn) -> Observation:
        self.turns.append(turn.text)
        said = (Message(role="tool", content=f"about {turn.text}: " + "x" * 60),)
        return Observation(said, done=turn.text == "DONE", check=turn.text.startswith("test"))


def compress(engine: Scripted, world: Echo, *, turns: int = 12, context: int = 700, **config: int):
    loop = AgentLoop(
        engine,  # type: ignore[arg-type]
        RENDERER,
        None,  # type: ignore[arg-type]
        context_tokens=context,
        compression=CompressionConfig.model_validate(config),
    )
    attempt = Attempt("g-0", "g", 0, seed=1)
    return asyncio.run(loop.run(world, task(turns), Sampling(temperature=0.7), attempt))  # type: ignore[arg-type]


WORDS = ("test one", "two", "three", "four", "five", "six", "DONE")


def test_r33_a_compressed_trace_is_trained_against_the_prompts_that_were_sent():
    engine = Scripted(*WORDS)
    trace, evidence = compress(engine, Long(), limit_tokens=450, keep_tail=2)
    assert trace.failure is None and evidence.answer == "DONE" and evidence.turns == 7
    assert len(trace.segments) == len(trace.compressions) + 1 > 1
    sent = iter(engine.prompts)
    said: list[int] = []
    for segment in trace.segments:
        for start in segment.turns:
            prompt = next(sent)
            assert [int(t) for t in segment.tokens[:start]] == prompt, "what is trained on is what was sent"
            assert len(prompt) <= 450
        assert segment.own[segment.turns[0]] and not segment.own[: segment.turns[0]].any()
        said += [int(t) for t in segment.tokens[segment.own]]
    assert next(sent, None) is None
    assert TOKENIZER.decode(said) == "".join(WORDS), "every turn is trained on once"
    assert trace.usage.own_tokens == len(said)


def test_the_task_the_checks_and_the_latest_turns_stay():
    engine = Scripted(*WORDS)
    trace, _ = compress(engine, Long(), context=900, limit_tokens=600, keep_tail=1)
    (first, *_) = trace.compressions
    prompt = TOKENIZER.decode(engine.prompts[first.turn])
    assert "say something" in prompt and f"[{first.left_out} earlier turns were removed" in prompt
    assert "about test one" in prompt, "an old check stays"
    latest = WORDS[first.turn - 1]
    assert f"about {latest}" in prompt
    dropped = [word for word in WORDS[1 : first.turn - 1] if f"about {word}" in prompt]
    assert dropped == [] and first.left_out == first.turn - 2
    assert (first.tokens_after, first.segment) == (len(engine.prompts[first.turn]), 1)
    assert first.tokens_before > 600 > first.tokens_after
    engine = Scripted(*WORDS)
    trace, _ = compress(engine, Long(), context=900, limit_tokens=600, keep_tail=1, keep_checks=0)
    assert "about test one" not in TOKENIZER.decode(engine.prompts[trace.compressions[0].turn])


def test_a_summary_is_the_models_own_and_its_seed_is_recorded():
    engine = Scripted("one", "two", "three", "four", "I did two things", "DONE")
    trace, _ = compress(engine, Long(), context=800, limit_tokens=390, keep_tail=1, summary_tokens=40)
    (compression,) = trace.compressions
    old, new = trace.segments
    asked = engine.samplings[4]
    assert compression.summary_seed == asked.seed == derive_seed(1, "summary", 0)
    assert asked.max_tokens == 40 and asked.temperature == 0.7
    assert "Write down what you have to remember" in TOKENIZER.decode(engine.prompts[4])
    assert "I did two things" in TOKENIZER.decode([int(t) for t in old.tokens[old.own]])
    assert "What you noted of them:\nI did two things" in TOKENIZER.decode(engine.prompts[5])
    assert [int(t) for t in new.tokens[: new.turns[0]]] == engine.prompts[5]


def test_what_would_make_little_room_is_not_left_out():
    trace, _ = compress(Scripted("one", "two", "DONE"), Long(), limit_tokens=200, keep_tail=1)
    assert trace.compressions == (), "one short turn less costs a new prefix and wins nothing"


def test_where_not_even_the_last_turn_fits_the_episode_ends_as_without():
    trace, _ = compress(Scripted(*WORDS), Long(), context=300, limit_tokens=100)
    assert trace.compressions == () and len(trace.segments) == 1 and trace.stop == "length"
