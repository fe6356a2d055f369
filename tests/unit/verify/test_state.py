from __future__ import annotations

from typing import Any

from lehr.core.reward import Invalid

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
