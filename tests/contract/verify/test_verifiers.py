"""What every verifier must keep: right evidence earns 1, none earns 0, and evidence alone can never break it.

To run the suite on a verifier of your own, add a :class:`Sample` of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.core.episode import Evidence
from lehr.core.task import Gold, Message, Task
from lehr.sandbox.pool import Pool
from lehr.verify.base import VERIFIERS, NoScore, Score
from lehr.verify.verifiers import BUILTIN, register

register(VERIFIERS)
TASK = Task(id="t@0/train/0", domain="t", messages=(Message(role="user", content="q"),))
CODE = b"def f(x):\n    return [x, {'k': None}]\n"


@dataclass(frozen=True)
class Sample:
    """Gold, and evidence that is worth everything. ``boxed`` verifiers run in a box."""

    gold: Mapping[str, Any]
    answer: str = ""
    files: Mapping[str, bytes] = field(default_factory=dict)
    boxed: bool = False


SAMPLES = {
    "run_unit_tests": Sample(
        {
            "entry": "f",
            "tests": [{"args": [2], "want": [2, {"k": None}]}, {"args": ["é"], "want": ["é", {"k": None}]}],
        },
        files={"solution.py": CODE},
        boxed=True,
    ),
    "run_static_checks": Sample({"entry": "f", "arity": 1}, files={"solution.py": CODE}),
    "match_fields": Sample({"fields": {"a": {"type": "amount", "value": "-1.50"}}}, answer='{"a": -1.5}'),
    "match_state": Sample({"start": {"a": "1"}, "want": {"b": "1"}}, files={"b": b"1\n"}),
    "match_answer": Sample({"kind": "integer", "answer": "42"}, answer="42"),
}


def score(name: str, evidence: Evidence, gold: Mapping[str, Any]) -> Score | NoScore:
    async def run() -> Score | NoScore:
        pool = Pool(warm=0, limit=1)
        try:
            return await VERIFIERS.get(name)(TASK, evidence, Gold((), gold), pool)
        finally:
            await pool.close()

    return asyncio.run(run())


def test_every_verifier_has_a_sample() -> None:
    assert set(SAMPLES) == set(BUILTIN) <= set(VERIFIERS)


@pytest.mark.parametrize("name", SAMPLES)
def test_right_evidence_earns_everything_each_time(name: str) -> None:
    sample = SAMPLES[name]
    evidence = Evidence("t", sample.answer, sample.files)
    first, second = score(name, evidence, sample.gold), score(name, evidence, sample.gold)
    assert isinstance(first, Score) and first.value == 1.0 and first == second


@pytest.mark.parametrize("name", SAMPLES)
def test_empty_evidence_earns_nothing(name: str) -> None:
    got = score(name, Evidence("t", ""), SAMPLES[name].gold)
    start = {path: text.encode() for path, text in SAMPLES[name].gold.get("start", {}).items()}
    untouched = score(name, Evidence("t", "", start), SAMPLES[name].gold)
    assert isinstance(untouched, Score) and untouched.value == 0.0
    assert isinstance(got, Score) and (got.value == 0.0 or name == "match_state")


@pytest.mark.parametrize("name", SAMPLES)
def test_missing_gold_is_our_fault(name: str) -> None:
    got = score(name, Evidence("t", SAMPLES[name].answer, SAMPLES[name].files), {})
    assert isinstance(got, NoScore) and got.reason == "verifier_crash"


@pytest.mark.parametrize("name", [name for name, sample in SAMPLES.items() if not sample.boxed])
@settings(max_examples=60, deadline=None)
@given(
    answer=st.text(max_size=200) | st.from_regex(r"[-($0-9.,)€ {\[\":]*", fullmatch=True),
    data=st.binary(max_size=200),
)
def test_no_evidence_breaks_it(name: str, answer: str, data: bytes) -> None:
    files = {"solution.py": data, "b": data}
    got = score_directly(name, Evidence("t", answer, files))
    assert isinstance(got, Score) and 0.0 <= got.value <= 1.0


def score_directly(name: str, evidence: Evidence) -> Score | NoScore:
    """Score without a pool; such verifiers need none."""
    boxes: Any = None
    return asyncio.run(VERIFIERS.get(name)(TASK, evidence, Gold((), SAMPLES[name].gold), boxes))  # pyright: ignore


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xfe\x00",
        b"def f(x):\n    return x\n\x00",
        b"f = " + b"[" * 5000,
        b"#" * 70_000,
        b"while True: pass\n",
        b"import os\nos.close(0)\nos.closerange(1, 64)\ndef f(x): return 1\n",
        b"raise MemoryError\n",
        b"def f(x):\n    return 'x' * 10 ** 9\n",
    ],
)
def test_no_program_breaks_the_boxed_one(data: bytes) -> None:
    got = score("run_unit_tests", Evidence("t", "", {"solution.py": data}), SAMPLES["run_unit_tests"].gold)
    assert isinstance(got, Score) and got.value == 0.0
