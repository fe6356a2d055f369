"""Where requests go when there are several engines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from lehr.core.errors import ConfigError, RoleLost
from lehr.core.trace import Completion, Sampling, Version
from lehr.engine.messages import Allotment
from lehr.engine.router import SLACK, Router, divided


class Recording:
    """An engine that answers when it is told to, and writes down what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.go = asyncio.Event()
        self.go.set()
        self.may_switch = asyncio.Event()
        self.may_switch.set()
        self.version = Version(1, 0)
        self.share: Allotment | None = None
        self.lost = False

    async def generate(
        self, tokens: list[int], sampling: Sampling, *, session: str = "", timeout_s: float = 600.0
    ) -> Completion:
        self.asked.append(tuple(tokens))
        await self.go.wait()
        zeros = np.zeros(1, np.float32)
        versions = np.array([self.version.packed], np.int64)
        return Completion(np.array([1], np.int32), zeros, zeros, zeros, versions, "length", 0)

    async def activate(self, version: Version, in_flight: str = "keep") -> None:
        if self.lost:
            raise RoleLost("engine-1 is gone")
        await self.may_switch.wait()
        self.version = version

    async def allot(self, allotment: Allotment) -> None:
        self.share = allotment


def routed(count: int = 2) -> tuple[Router, list[Recording]]:
    members = [Recording() for _ in range(count)]
    return Router(members), members  # pyright: ignore[reportArgumentType]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 10))


def test_a_group_and_the_turns_of_a_session_share_an_engine():
    async def go() -> None:
        router, members = routed()
        for member in members:
            member.go.clear()
        first = [
            asyncio.create_task(router.generate([prompt], Sampling(), session=f"{prompt}/{n}"))
            for prompt in range(4)
            for n in range(3)
        ]
        await asyncio.sleep(0.01)
        for member in members:
            member.go.set()
        await asyncio.gather(*first)
        for prompt in range(4):
            await router.generate([prompt, 7], Sampling(), session=f"{prompt}/1")
        assert all(member.asked for member in members), "one engine got everything"
        seen = [{tokens[0] for tokens in member.asked} for member in members]
        assert not seen[0] & seen[1] and seen[0] | seen[1] == {0, 1, 2, 3}

    run(go())


def test_different_prompts_spread_evenly():
    async def go() -> None:
        router, members = routed(3)
        for member in members:
            member.go.clear()
        tasks = [asyncio.create_task(router.generate([n], Sampling())) for n in range(30)]
        await asyncio.sleep(0.01)
        assert [len(member.asked) for member in members] == [10, 10, 10]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(go())


def test_a_popular_prompt_does_not_pin_one_engine():
    async def go() -> None:
        router, members = routed()
        for member in members:
            member.go.clear()
        tasks = [asyncio.create_task(router.generate([5], Sampling())) for _ in range(40)]
        await asyncio.sleep(0.01)
        counts = [len(member.asked) for member in members]
        assert sum(counts) == 40 and abs(counts[0] - counts[1]) <= SLACK
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in members:
            member.go.set()
            member.asked.clear()
        await router.generate([5], Sampling())
        assert sum(len(member.asked) for member in members) == 1, "a cancelled request still counts"

    run(go())


def test_nothing_is_passed_on_while_weights_differ():
    async def go() -> None:
        router, members = routed()
        members[1].may_switch.clear()
        switching = asyncio.create_task(router.activate(Version(1, 1)))
        await asyncio.sleep(0.01)
        assert members[0].version == Version(1, 1) and members[1].version == Version(1, 0)
        asking = asyncio.create_task(router.generate([1], Sampling()))
        await asyncio.sleep(0.01)
        assert not members[0].asked and not members[1].asked
        members[1].may_switch.set()
        await switching
        assert (await asking).versions.tolist() == [Version(1, 1).packed]

    run(go())


def test_a_lost_engine_is_named_and_does_not_block_the_others():
    async def go() -> None:
        router, members = routed()
        members[1].lost = True
        with pytest.raises(RoleLost, match="engine-1 is gone"):
            await router.activate(Version(1, 1))
        await router.generate([1], Sampling())

    run(go())


def test_cores_are_divided():
    assert divided(Allotment(4, (0, 1, 2, 3)), 2) == [Allotment(2, (0, 2)), Allotment(2, (1, 3))]
    assert divided(Allotment(1, (0,)), 2) == [Allotment(1, (0,))] * 2
    assert divided(Allotment(2, ()), 2) == [Allotment(1, ())] * 2

    async def go() -> None:
        router, members = routed()
        await router.allot(Allotment(2, (4, 5)))
        assert [member.share for member in members] == [Allotment(1, (4,)), Allotment(1, (5,))]

    run(go())
    with pytest.raises(ConfigError, match="at least one"):
        Router([])
