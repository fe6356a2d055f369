from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from lehr.core.episode import Evidence, Observation, Turn
from lehr.core.task import Gold, Message, Task
from lehr.domains.environments import ENVIRONMENTS
from lehr.domains.environments.answer import fenced_block
from lehr.sandbox.pool import Pool
from lehr.verify.base import Score
from lehr.verify.verifiers.state import match_state


def play(environment: str, turns: Sequence[str], **fields: object) -> tuple[list[Observation], Evidence]:
    task = Task.model_validate(
        {"id": "t@0/train/0", "domain": "t", "messages": (Message(role="user", content="q"),), **fields}
    )

    async def run() -> tuple[list[Observation], Evidence]:
        pool = Pool(warm=0, limit=1)
        try:
            episode = await ENVIRONMENTS.get(environment).open(task, pool)
            seen = [await episode.step(Turn(text)) for text in turns]
            first, second = await episode.close(), await episode.close()
            assert first == second
            return seen, first
        finally:
            await pool.close()

    return asyncio.run(run())


def sh(*lines: str) -> str:
    return "```sh\n" + "\n".join(lines) + "\n```"


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```python\ndef f(x):\n    return x\n```", "def f(x):\n    return x\n"),
        ("Sure:\n```\nx = 1\n```\nand\n```\nx = 2\n```", "x = 1\n"),
        ("def f(x):\n    return x", "def f(x):\n    return x"),
        ("```python\ndef f(x):", None),
        ("I cannot do that.", None),
        ("", None),
    ],
)
def test_the_first_closed_fence_is_the_artefact(text: str, block: str | None) -> None:
    assert fenced_block(text) == block
    _, evidence = play("answer", [text], artifacts=("solution.py",))
    assert evidence.files == ({} if block is None else {"solution.py": block.encode()})
    assert evidence.answer == text


def test_an_answer_ends_after_one_turn() -> None:
    seen, evidence = play("answer", ["hello"])
    assert seen[0].done and evidence.turns == 1 and not evidence.files


def test_a_terminal_shows_output_and_collects_files() -> None:
    turns = [sh("cat a.txt"), sh("mkdir d", "mv a.txt d/", "echo 1 > n.txt"), sh("ls nothing"), "DONE"]
    seen, evidence = play("terminal", turns, files={"a.txt": "x\n"}, max_turns=5)
    assert [message.content for message in seen[0].messages] == ["x"]
    assert seen[0].messages[0].role == "tool" and seen[1].messages[0].content == "ok"
    assert "exit 2" in seen[2].messages[0].content
    assert [o.done for o in seen] == [False, False, False, True]
    assert evidence.files == {"d/": b"", "d/a.txt": b"x\n", "n.txt": b"1\n"} and evidence.turns == 4


def test_the_shell_remembers_and_outlives_what_ends_it() -> None:
    turns = [
        sh("mkdir d", "cd d", "N=7"),
        sh("echo $N > n.txt"),
        sh("exit 3"),
        sh("echo 'open"),
        sh("echo 8 > m.txt"),
    ]
    seen, evidence = play("terminal", turns)
    assert "exit 3" in seen[2].messages[0].content and "exit" in seen[3].messages[0].content
    assert evidence.files == {"d/": b"", "d/n.txt": b"7\n", "m.txt": b"8\n"}


def test_long_output_is_cut_in_the_middle() -> None:
    seen, _ = play("terminal", [sh("seq 1 1000")])
    text = seen[0].messages[0].content
    assert len(text) < 330 and text.startswith("1\n2\n") and text.endswith("999\n1000") and "\n...\n" in text


def test_failures_and_tests_tell_how_a_check_went() -> None:
    seen, _ = play("terminal", [sh("echo hi"), sh("false"), sh("python3 -m unittest -h")], max_turns=5)
    assert [observation.check for observation in seen] == [False, True, True]


def test_a_turn_without_a_block_ends_the_episode_and_takes_no_box() -> None:
    seen, evidence = play("terminal", ["I would move the file."], files={"a.txt": "x\n"})
    assert seen[0].done and evidence.files == {"a.txt": b"x\n"}


def test_a_command_that_hangs_is_reported_and_the_episode_goes_on() -> None:
    seen, evidence = play("terminal", [sh("echo before; sleep 60"), sh("echo 1 > n.txt")])
    assert "before" in seen[0].messages[0].content and "timeout" in seen[0].messages[0].content
    assert evidence.files == {"n.txt": b"1\n"}


def test_links_and_loops_are_not_collected() -> None:
    _, evidence = play("terminal", [sh("ln -s /etc/passwd p", "ln -s . loop", "mkfifo pipe", "echo 1 > n.txt")])
    assert evidence.files == {"n.txt": b"1\n"}
    assert evidence.unread == {"p": "link", "loop": "link", "pipe": "special"}


@pytest.mark.parametrize(
    "block",
    [
        "truncate -s 20M junk",
        "for i in $(seq 5000); do : > j$i; done",
        "for i in $(seq 300); do mkdir d; cd d; done",
        "yes > /work/big 2> /dev/null",
        "chmod 000 notes.txt",
        "chmod 000 .",
        "ln -sf /dev/null notes.txt",
        "mv notes.txt /tmp; mkfifo notes.txt",
    ],
)
def test_v26_what_cannot_be_collected_is_not_gone(block: str) -> None:
    _, evidence = play("terminal", [sh(block), "DONE"], files={"notes.txt": "a\n"}, max_turns=3)
    assert _removal(evidence) == 0.0, evidence


def test_v26_hidden_damage_is_damage() -> None:
    turns = [sh("rm notes.txt; echo x > q; chmod 0 q"), "DONE"]
    _, evidence = play("terminal", turns, files={"notes.txt": "a\n"}, max_turns=3)
    assert _removal(evidence) == 0.5
    _, evidence = play("terminal", [sh("rm notes.txt"), "DONE"], files={"notes.txt": "a\n"}, max_turns=3)
    assert _removal(evidence) == 1.0


def test_v26_an_artefact_that_is_refused_is_not_gone() -> None:
    fields = {"files": {"notes.txt": "a\n"}, "artifacts": ("notes.txt",), "max_turns": 3}
    _, evidence = play("terminal", [sh("mv notes.txt /tmp; mkfifo notes.txt"), "DONE"], **fields)
    assert _removal(evidence) == 0.0 and list(evidence.unread) == ["notes.txt"]
    _, evidence = play("terminal", [sh("rm notes.txt"), "DONE"], **fields)
    assert _removal(evidence) == 1.0


def _removal(evidence: Evidence) -> float:
    """Judge by a task that asks to remove notes.txt."""
    task = Task(id=evidence.task_id, domain="t", messages=(Message(role="user", content="q"),))
    gold = Gold((), {"start": {"notes.txt": "a\n"}, "want": {}})
    score = asyncio.run(match_state(task, evidence, gold, None))  # type: ignore[arg-type]
    assert isinstance(score, Score)
    return score.value
