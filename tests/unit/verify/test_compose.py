from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lehr.core.episode import Evidence
from lehr.core.errors import Failure, UnknownName
from lehr.core.reward import Invalid, Reward, Valid
from lehr.core.task import Gold, Message, RewardTerm, Task
from lehr.sandbox.base import Spec
from lehr.verify.base import VERIFIERS, NoScore, Score
from lehr.verify.compose import judge

TASK = Task(id="t@0/train/0", domain="t", messages=(Message(role="user", content="q"),))


class SlowLine:
    """Boxes that come after a wait."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    def lease(self, spec: Spec, *, timeout_s: float = 30.0, **_: Any) -> Any:
        raise AssertionError("not used")

    async def acquire(self, spec: Spec, *, timeout_s: float = 30.0, domain: str = "", **_: Any) -> Any:
        assert domain == TASK.domain
        await asyncio.sleep(self._wait_s)
        return object()

    async def release(self, box: Any) -> None:
        pass


@contextmanager
def registered(**verifiers: Any) -> Iterator[None]:
    for name, verifier in verifiers.items():
        VERIFIERS.register(name, verifier)
    try:
        yield
    finally:
        for name in verifiers:
            del VERIFIERS._items[name]  # pyright: ignore[reportPrivateUsage]


def gives(result: Any) -> Any:
    async def verifier(task: Any, evidence: Any, gold: Any, boxes: Any) -> Any:
        if isinstance(result, Exception):
            raise result
        return result

    return verifier


def reward(*terms: object, evidence: Evidence | None = None, **options: Any) -> Reward:
    return asyncio.run(
        judge(
            TASK,
            evidence or Evidence("t", ""),
            Gold((), {}),
            SlowLine(options.pop("wait_s", 0.0)),
            terms=[RewardTerm.model_validate(term) for term in terms],
            **options,
        )
    )


def test_weighted_mean_is_normalised_and_parts_are_kept() -> None:
    with registered(one=gives(Score(1.0)), half=gives(Score(0.5))):
        got = reward("one { weight: 1.0 }", "half { weight: 0.3 }")
        assert isinstance(got, Valid)
        assert got.value == pytest.approx((1.0 + 0.15) / 1.3)
        assert got.parts == {"one": 1.0, "half": 0.5} and not got.passed
        full = reward("one", {"one": {"weight": 0.3}})
        assert isinstance(full, Valid) and full.passed and full.parts == {"one": 1.0, "one#2": 1.0}


def test_a_failed_gate_voids_the_rest() -> None:
    with registered(one=gives(Score(1.0)), half=gives(Score(0.5))):
        got = reward("one", {"verifier": "half", "gate": True})
        assert isinstance(got, Valid) and got.value == 0.0


def test_range_and_pass_mark() -> None:
    with registered(half=gives(Score(0.5))):
        got = reward("half", reward_range=(-1.0, 1.0), pass_at=0.0)
        assert isinstance(got, Valid) and got.value == 0.0 and got.passed


def test_v21_a_verifier_that_times_out_is_invalid() -> None:
    async def slow(task: Any, evidence: Any, gold: Any, boxes: Any) -> Score:
        await asyncio.sleep(5)
        return Score(1.0)

    with registered(slow=slow, one=gives(Score(1.0))):
        got = reward("one", "slow", timeout_s=0.05)
    assert isinstance(got, Invalid) and got.reason == "verifier_timeout" and "slow" in got.detail


def test_v21_a_verifier_that_crashes_is_invalid() -> None:
    with registered(bad=gives(KeyError("tests")), one=gives(Score(1.0))):
        got = reward("one", "bad")
    assert isinstance(got, Invalid) and got.reason == "verifier_crash" and "KeyError" in got.detail


def test_no_score_and_failed_episodes_are_invalid() -> None:
    with registered(none=gives(NoScore("sandbox", "the box died")), one=gives(Score(1.0))):
        got = reward("one", "none")
        assert isinstance(got, Invalid) and got.reason == "sandbox"
        broken = reward("one", evidence=Evidence("t", "", failure=Failure("sandbox", "gone")))
        assert isinstance(broken, Invalid) and broken.reason == "environment"


def test_v20_waiting_for_a_box_is_not_the_verifiers_time() -> None:
    async def boxed(task: Any, evidence: Any, gold: Any, boxes: Any) -> Score:
        async with boxes.lease(Spec()):
            return Score(1.0)

    async def boxed_and_slow(task: Any, evidence: Any, gold: Any, boxes: Any) -> Score:
        async with boxes.lease(Spec()):
            await asyncio.sleep(5)
            return Score(1.0)

    with registered(boxed=boxed, boxed_and_slow=boxed_and_slow):
        right = reward("boxed", timeout_s=0.1, wait_s=0.3)
        late = reward("boxed_and_slow", timeout_s=0.1, wait_s=0.3)
    assert isinstance(right, Valid) and right.passed
    assert isinstance(late, Invalid) and late.reason == "verifier_timeout"


@pytest.mark.parametrize(
    ("value", "reason"), [(math.nan, "not_finite"), (math.inf, "not_finite"), (2.0, "out_of_range")]
)
def test_v23_values_outside_the_range_are_invalid(value: float, reason: str) -> None:
    with registered(odd=gives(Score(value)), zero=gives(Score(0.0))):
        got = reward("odd", "zero")
    assert isinstance(got, Invalid) and got.reason == reason


def test_an_unknown_verifier_is_the_users_mistake() -> None:
    with pytest.raises(UnknownName, match="run_unit_tests"):
        reward("run_unit_test")
