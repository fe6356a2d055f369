import asyncio
from typing import cast

import pytest

from lehr.rollout.base import Group
from lehr.rollout.dispatcher import Dispatcher
from lehr.rollout.group import GroupPlan


class Bound:
    """Admission as the architecture states it, written out here by hand."""

    def __init__(self, bound: int, batch: int) -> None:
        self.bound, self.batch = bound, batch

    def capacity(self, version_n: int, started: int) -> int:
        return (self.bound + version_n + 1) * self.batch - started


class World:
    """Groups finish when the test says so."""

    def __init__(self, bound: int, *, concurrency: int = 99) -> None:
        self.plans = 0
        self.gates: dict[int, asyncio.Event] = {}
        self.finished: list[str] = []
        self.cancelled: list[int] = []
        self.break_at: int | None = None
        self.dispatcher = Dispatcher(self.plan, self.run, self.done, Bound(bound, 2), concurrency=concurrency)

    def plan(self) -> GroupPlan:
        self.plans += 1
        self.gates[self.plans] = asyncio.Event()
        return cast(GroupPlan, self.plans)

    async def run(self, plan: GroupPlan) -> Group:
        number = cast(int, plan)
        if number == self.break_at:
            raise ZeroDivisionError(f"group {number} broke")
        try:
            await self.gates[number].wait()
        except asyncio.CancelledError:
            self.cancelled.append(number)
            raise
        return Group(str(number), "d", "t", ())

    def done(self, group: Group) -> None:
        self.finished.append(group.id)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_r3_bound_zero_starts_one_batch_per_version():
    async def scenario() -> None:
        world = World(0)
        running = asyncio.create_task(world.dispatcher.run())
        await settle()
        assert world.plans == 2
        for gate in list(world.gates.values()):
            gate.set()
        await settle()
        assert world.finished == ["1", "2"]
        assert world.plans == 2, "nothing may start before the next version is in force"
        world.dispatcher.advance(1)
        await settle()
        assert world.plans == 4
        world.dispatcher.stop()
        await running

    asyncio.run(scenario())


def test_r6_a_group_slower_than_the_bound_is_finished_and_holds_its_place():
    async def scenario() -> None:
        world = World(1)
        running = asyncio.create_task(world.dispatcher.run())
        await settle()
        for version in range(1, 6):  # group 1 runs on while five versions are trained of the others
            for number in sorted(world.gates)[1 : 1 + 2 * version]:
                world.gates[number].set()
            await settle()
            world.dispatcher.advance(version)
            await settle()
            assert world.plans == 2 * (version + 2)
        world.gates[1].set()
        await settle()
        assert world.finished[-1] == "1" and world.cancelled == []
        assert sorted(map(int, world.finished)) == list(range(1, 12)), "whatever was sampled is handed over"
        world.dispatcher.stop()
        await running

    asyncio.run(scenario())


def test_a_dropped_group_is_replaced_and_an_accepted_one_is_not():
    async def scenario() -> None:
        world = World(0)
        running = asyncio.create_task(world.dispatcher.run())
        await settle()
        world.gates[1].set()
        await settle()
        assert world.plans == 2
        world.dispatcher.release()
        await settle()
        assert world.plans == 3
        world.dispatcher.stop()
        await running

    asyncio.run(scenario())


def test_concurrency_bounds_what_is_in_flight():
    async def scenario() -> None:
        world = World(5, concurrency=3)
        running = asyncio.create_task(world.dispatcher.run())
        await settle()
        assert (world.plans, world.dispatcher.running) == (3, 3)
        world.dispatcher.stop()
        await running
        assert sorted(world.cancelled) == [1, 2, 3]

    asyncio.run(scenario())


def test_r24_the_exception_of_a_group_ends_the_run_with_that_exception():
    async def scenario() -> None:
        world = World(0)
        world.break_at = 2
        with pytest.raises(ExceptionGroup) as caught:
            await asyncio.wait_for(world.dispatcher.run(), 1)
        assert caught.group_contains(ZeroDivisionError, match="group 2 broke")

    asyncio.run(scenario())


def test_r5_a_resumed_run_is_granted_the_same_capacity():
    async def scenario() -> None:
        world = World(1)
        world.dispatcher.preload(started=7, version_n=3)  # (1 + 3 + 1) * 2 = 10
        running = asyncio.create_task(world.dispatcher.run())
        await settle()
        assert world.plans == 3
        world.dispatcher.stop()
        await running

    asyncio.run(scenario())
