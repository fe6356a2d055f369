"""Episodes of a model that is asked in messages."""

import asyncio
from collections.abc import Sequence

import pytest

from lehr.core.completer import Answer, AnswerError, NoAccess
from lehr.core.episode import Evidence, Observation, Turn
from lehr.core.errors import DeadlineExceeded, LehrError
from lehr.core.task import Message, Task, ToolSpec
from lehr.core.trace import Sampling, Trace, Usage
from lehr.rollout.agent import Attempt, derive_seed
from lehr.rollout.chat import ChatLoop


class Scripted:
    """A completer that says what it is told, and remembers what it was sent."""

    def __init__(self, *answers: Answer | LehrError) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[tuple[str, str], ...]] = []
        self.samplings: list[Sampling] = []

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, *, timeout_s: float | None = None
    ) -> Answer:
        self.asked.append(tuple((m.role, m.content) for m in messages))
        self.samplings.append(sampling)
        answer = self.answers.pop(0)
        if isinstance(answer, LehrError):
            raise answer
        return answer

    async def close(self) -> None: ...


class Echo:
    """An environment that answers each turn with its length and ends on DONE."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.closed = 0

    async def open(self, task: Task, boxes: object) -> "Echo":
        return self

    async def step(self, turn: Turn) -> Observation:
        self.turns.append(turn)
        if turn.text == "sleep":
            await asyncio.sleep(60)
        said = (Message(role="tool", content=f"len {len(turn.text)}"),)
        return Observation(said, done=turn.text == "DONE")

    async def close(self) -> Evidence:
        self.closed += 1
        return Evidence("t", self.turns[-1].text if self.turns else "", turns=len(self.turns))


def run(
    completer: Scripted, world: Echo, *, temperature: float = 0.7, tools: tuple[ToolSpec, ...] = ()
) -> tuple[Trace, Evidence]:
    message = Message(role="user", content="say something")
    task = Task(
        id="t", domain="d", messages=(message,), max_turns=3, max_tokens=20, timeout_s=0.3, tools=tools,
        stop=("END",),
    )  # fmt: skip
    loop = ChatLoop(completer, None)  # type: ignore[arg-type]
    attempt = Attempt("g-0", "g", 0, seed=1)
    return asyncio.run(loop.run(world, task, Sampling(temperature=temperature), attempt))  # type: ignore[arg-type]


def test_a_conversation_grows_turn_by_turn():
    completer = Scripted(Answer("first", "length", Usage(5, 1, 2)), Answer("DONE", "stop", Usage(9, 4, 3)))
    world = Echo()
    trace, evidence = run(completer, world)
    start = ("user", "say something")
    assert completer.asked == [(start,), (start, ("assistant", "first"), ("tool", "len 5"))]
    assert [(t.text, t.truncated) for t in world.turns] == [("first", True), ("DONE", False)]
    assert evidence.answer == "DONE" and evidence.turns == 2 and world.closed == 1
    assert trace.usage == Usage(14, 5, 5) and trace.segments == () and trace.failure is None
    assert trace.stop == "stop" and trace.oldest_version is None
    assert [s.name for s in trace.spans] == ["queue", "generate", "tool", "generate", "tool"]
    first, second = completer.samplings
    assert (first.max_tokens, first.stop, first.seed, second.seed) == (
        20, ("END",), derive_seed(1, 0), derive_seed(1, 1),
    )  # fmt: skip


def test_turns_end_and_greedy_has_no_seed():
    completer = Scripted(*(Answer(str(n), "stop") for n in range(5)))
    _, evidence = run(completer, Echo(), temperature=0.0)
    assert evidence.turns == 3 and len(completer.answers) == 2
    assert all(s.seed is None for s in completer.samplings)


@pytest.mark.parametrize(
    ("error", "code"), [(AnswerError("no answer"), "answer"), (DeadlineExceeded("late"), "deadline")]
)
def test_a_failure_is_data(error: LehrError, code: str):
    world = Echo()
    trace, evidence = run(Scripted(Answer("first", "stop"), error), world)
    assert trace.failure is not None and trace.failure.code == code and evidence.failure == trace.failure
    assert evidence.turns == 1 and world.closed == 1


def test_an_environment_that_hangs_is_left():
    trace, _ = run(Scripted(Answer("sleep", "stop")), Echo())
    assert trace.failure is not None and "the environment took more than 0.3 s" in trace.failure.detail


def test_what_would_end_every_episode_is_raised():
    world = Echo()
    with pytest.raises(NoAccess):
        run(Scripted(NoAccess("wrong key")), world)
    assert world.closed == 1


def test_tools_cannot_be_offered_yet():
    trace, _ = run(Scripted(), Echo(), tools=(ToolSpec(name="add"),))
    assert trace.failure is not None and "offers tools" in trace.failure.detail


def test_what_was_said_is_told_once_with_the_last_answer_and_not_of_a_failure() -> None:
    heard: dict[str, list[tuple[str, str]]] = {}

    def listen(trace: str, said: Sequence[Message]) -> None:
        heard[trace] = [(m.role, m.content) for m in said]

    for trace, *answers in (
        ("good", Answer("hm", "stop"), Answer("DONE", "stop")),
        ("bad", Answer("hm", "stop"), AnswerError("no")),
    ):
        loop = ChatLoop(Scripted(*answers), None, heard=listen)  # type: ignore[arg-type]
        task = Task(id="t", domain="d", messages=(Message(role="user", content="go"),), max_turns=3)
        asyncio.run(loop.run(Echo(), task, Sampling(), Attempt(trace, "g", 0, 1)))
    assert heard == {"good": [("user", "go"), ("assistant", "hm"), ("tool", "len 2"), ("assistant", "DONE")]}
