from __future__ import annotations

from typing import Any

import pytest

from lehr.core.reward import Invalid


@pytest.mark.parametrize(
    ("kind", "gold", "said", "right"),
    [
        ("integer", "42", "(42)", True),
        ("integer", "42", "42!", True),
        ("integer", "42", "**42**.", True),
        ("integer", "29", "$29.00", True),
        ("integer", "1234", "1,234", True),
        ("integer", "11", "711", False),
        ("integer", "1", "10", False),
        ("integer", "10", "1", False),
        ("integer", "42", "not 42", False),
        ("integer", "42", "41 or 42", False),
        ("integer", "42", "41, 42", False),
        ("integer", "42", "Let me see.\nAnswer: 42", True),
        ("integer", "42", "Answer: 42\nAnswer: 41", False),
        ("integer", "42", "42\n41", False),
        ("integer", "42", "", False),
        ("integer", "42", "The answer could be 42", False),
        ("integer", "-4", "-4", True),
        ("integer", "-4", "4", False),
        ("integer", "-4", "(4)", False),
        ("decimal", "0.3125", "0.31250", True),
        ("decimal", "0.3125", "0.3126", False),
        ("fraction", "138/583", "138 / 583", True),
        ("fraction", "1/2", "2/4", False),
        ("word", "Zeeshan", "zeeshan.", True),
        ("word", "Zeeshan", "Zeeshan or James", False),
        ("text", "a b", "a  b", True),
        ("text", "a b", "A b", False),
        ("list", "b, a", "b,a", True),
        ("list", "b, a", "a, b", False),
        ("numbers", "['1.0', '-2']", "[1, -2.0]", True),
        ("numbers", "['1.0', '-2']", "[-2, 1]", False),
        ("numbers", "[]", "[]", True),
        ("numbers", "[]", "[0]", False),
    ],
)
def test_v19_short_answers(judge_plain: Any, kind: str, gold: str, said: str, right: bool) -> None:
    assert judge_plain("match_answer", said, {"answer": gold, "kind": kind}).value == float(right)


def test_v27_what_reasoning_gym_pays_for_wrongly_earns_nothing(judge_plain: Any) -> None:
    assert judge_plain("match_answer", "1292", {"answer": "292", "kind": "integer"}).value == 0.0
    assert judge_plain("match_answer", "-40", {"answer": "-4", "kind": "integer"}).value == 0.0
    assert judge_plain("match_answer", "0", {"answer": "0.000122", "kind": "decimal"}).value == 0.0
    assert judge_plain("match_answer", "", {"answer": "1/2", "kind": "fraction"}).value == 0.0


def test_gold_that_cannot_be_read_is_invalid(judge_plain: Any) -> None:
    got = judge_plain("match_answer", "1", {"answer": "one", "kind": "integer"})
    assert isinstance(got, Invalid) and got.reason == "verifier_crash"
