from __future__ import annotations

import asyncio
from typing import Any

from lehr.core.episode import Evidence
from lehr.core.reward import Invalid
from lehr.core.task import Gold, Message, Task
from lehr.verify.base import Score
from lehr.verify.verifiers.state import match_state

TASK = Task(id="t@0/train/0", domain="t", messages=(Message(role="user", content="q"),))

START = {"a.txt": "x\n", "b.txt": "y\n", "old/c.txt": "z\n"}
WANT = {"a.txt": "x\n", "new/b.txt": "y\n", "n.txt": "1\n", "old/c.txt": "z\n"}
DONE = {"a.txt": b"x\n", "new/": b"", "new/b.txt": b"y\n", "n.txt": b"1", "old/": b"", "old/c.txt": b"z\n"}


def value(judge_plain: Any, files: dict[str, bytes], said: str = "DONE") -> float:
    return judge_plain("match_state", said, {"start": START, "want": WANT}, files=files).value


def test_the_wanted_state_is_worth_everything(judge_plain: Any) -> None:
    assert value(judge_plain, DONE) == 1.0


def test_v26_doing_nothing_scores_nothing(judge_plain: Any) -> None:
    untouched = {path: text.encode() for path, text in START.items()}
    assert value(judge_plain, untouched, "I moved b.txt and counted. DONE") == 0.0
    assert value(judge_plain, {}) == 1 / (3 + 2)  # removing everything removes b.txt, and damages two files


def test_part_of_the_changes(judge_plain: Any) -> None:
    assert value(judge_plain, {**DONE, "n.txt": b"2\n"}) == 2 / 3
    assert value(judge_plain, {**DONE, "b.txt": b"y\n"}) == 2 / 3


def test_damage_and_litter_cost(judge_plain: Any) -> None:
    assert value(judge_plain, {**DONE, "extra.txt": b""}) == 3 / 4
    assert value(judge_plain, {**DONE, "empty/": b""}) == 3 / 4
    assert value(judge_plain, {**DONE, "a.txt": b"changed"}) == 3 / 4


def test_a_task_without_a_change_cannot_be_judged(judge_plain: Any) -> None:
    got = judge_plain("match_state", "", {"start": START, "want": START}, files={})
    assert isinstance(got, Invalid)


def test_what_could_not_be_taken_is_neither_gone_nor_as_it_should_be() -> None:
    gold = Gold((), {"start": {"a": "x", "d/b": "y"}, "want": {"d/b": "y"}})
    gone = Evidence("t", "", {"d/b": b"y"})
    assert scored(gone, gold) == 1.0
    assert scored(Evidence("t", "", {"d/b": b"y"}, unread={"a": "file"}), gold) == 0.0
    assert scored(Evidence("t", "", {}, unread={"d/": "folder"}), gold) == 0.5, "what lies in it may be damaged"
    assert scored(Evidence("t", "", {"d/b": b"y"}, unread={"q": "file"}), gold) == 0.5, "hidden damage"
    assert scored(Evidence("t", "", {}, refused="more than 4096 files"), gold) == 0.0


def scored(evidence: Evidence, gold: Gold) -> float:
    score = asyncio.run(match_state(TASK, evidence, gold, None))  # type: ignore[arg-type]
    assert isinstance(score, Score)
    return score.value
