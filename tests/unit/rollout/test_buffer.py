import asyncio

import numpy as np
import pytest

from lehr.core.reward import Invalid, Reward, Valid
from lehr.core.trace import Sampling, Segment, Trace
from lehr.rollout.base import Group, Judged
from lehr.rollout.buffer import Buffer, Filled, Starved, teaches


def member(group: str, attempt: int, reward: Reward) -> Judged:
    one = np.zeros(2, np.float32)
    segment = Segment(
        np.array([1, 2], np.int32),
        np.array([False, True]),
        one,
        one,
        one + 1,
        np.array([-1, 0]),
        np.array([1], np.int32),
        Sampling(),
    )
    return Judged(Trace(f"{group}-{attempt}", "t", group, attempt, (segment,)), reward)


def group(name: str, *values: float | None) -> Group:
    rewards = [Invalid("sandbox") if v is None else Valid(v) for v in values]
    return Group(name, "d", "t", tuple(member(name, i, r) for i, r in enumerate(rewards)))


def test_a_group_without_variance_teaches_nothing():
    assert teaches(group("a", 1.0, 1.0, 1.0)) == "no_variance"
    assert teaches(group("a", 0.0, 1.0)) is None


def test_r17_invalid_members_are_not_zeros():
    assert teaches(group("a", 1.0, 1.0, None)) == "no_variance"
    assert teaches(group("a", 1.0, None)) == "no_survivors"


def test_by_passing_alone_partial_credit_is_no_difference():
    half = group("a", 0.2, 0.6)
    assert teaches(half, "value") is None
    assert teaches(half, "passed") == "no_variance"
    members = (member("b", 0, Valid(0.9, passed=False)), member("b", 1, Valid(0.9, passed=True)))
    mixed = Group("b", "d", "t", members)
    assert teaches(mixed, "value") == "no_variance"
    assert teaches(mixed, "passed") is None


def test_batches_are_handed_over_oldest_first():
    async def scenario() -> None:
        buffer = Buffer(lambda g, r: None, refuse_limit=9)
        for name in "abc":
            buffer.put(group(name, 0.0, 1.0))
        taken = await buffer.take(2)
        assert isinstance(taken, Filled)
        assert [g.id for g in taken.groups] == ["a", "b"]
        assert len(buffer) == 1

    asyncio.run(scenario())


def test_r27_a_stream_that_teaches_nothing_ends_in_a_typed_outcome():
    async def scenario() -> None:
        dropped: list[str] = []
        buffer = Buffer(lambda g, r: dropped.append(f"{g.id}:{r}"), refuse_limit=3)
        buffer.put(group("good", 0.0, 1.0))
        taking = asyncio.create_task(buffer.take(2))
        for name in "xyz":
            await asyncio.sleep(0)
            buffer.put(group(name, 1.0, 1.0))
        outcome = await asyncio.wait_for(taking, 1)
        assert isinstance(outcome, Starved)
        assert [g.id for g in outcome.groups] == ["good"]
        assert outcome.refused == 3 and outcome.domains == {"d": 3}
        assert buffer.take_dropped() == {("no_variance", "d"): 3} and buffer.take_dropped() == {}
        assert dropped == ["x:no_variance", "y:no_variance", "z:no_variance"]

    asyncio.run(scenario())


def test_an_accepted_group_starts_the_count_of_refusals_again():
    async def scenario() -> None:
        buffer = Buffer(lambda g, r: None, refuse_limit=2)
        for name, last in (("a", 1.0), ("b", 0.0), ("c", 1.0), ("d", 0.0)):
            buffer.put(group(name, 1.0, last))
        taken = await buffer.take(2)
        assert isinstance(taken, Filled)

    asyncio.run(scenario())


def test_r24_a_failure_elsewhere_ends_the_wait_with_that_failure():
    async def scenario() -> None:
        buffer = Buffer(lambda g, r: None, refuse_limit=2)
        taking = asyncio.create_task(buffer.take(1))
        await asyncio.sleep(0)
        buffer.fail(ZeroDivisionError("the dispatcher broke"))
        with pytest.raises(ZeroDivisionError, match="the dispatcher broke"):
            await asyncio.wait_for(taking, 1)

    asyncio.run(scenario())
