"""Set-up steps: run once, kept as snapshots, shared as far as two set-ups begin alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from lehr.sandbox.base import Limits, Spec
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.pool import Pool
from lehr.sandbox.setups import Setup, SetupFailed, SetUps, SetupStep

SMALL = Spec(limits=Limits(memory_bytes=128 << 20, disk_bytes=16 << 20, inodes=512, wall_s=10.0))
FILES = {"a.txt": b"of the task\n"}


def step(name: str, *commands: str, timeout_s: float = 10.0) -> SetupStep:
    return SetupStep(name, commands, timeout_s)


def setup(*steps: SetupStep, files: Mapping[str, bytes] = FILES) -> Setup:
    return Setup(files, steps)


class Events:
    """Keeps what is recorded."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def record(self, kind: str, /, **fields: Any) -> None:
        self.seen.append({"kind": kind, **fields})

    @property
    def programs(self) -> list[str]:
        return [event["program"] for event in self.seen if event["kind"] == "sandbox.exec"]


def on_pool(use: Callable[[Pool, SetUps, Events], Awaitable[None]], **bounds: int) -> None:
    async def run() -> None:
        events = Events()
        pool = Pool(warm=0, limit=3, recorder=events)
        setups = SetUps(pool, **bounds)
        try:
            await use(pool, setups, events)
        finally:
            await setups.close()
            await pool.close()

    asyncio.run(run())


async def look(pool: Pool, setups: SetUps, what: Setup, command: str) -> str:
    async with setups.ready(SMALL, what) as snapshot:
        box = await pool.acquire(SMALL, snapshot=snapshot)
    try:
        result = await box.exec(["sh", "-c", command])
        return (result.stdout + result.stderr).decode()
    finally:
        await pool.release(box)


def test_steps_run_once_in_order_on_the_files_and_a_shared_beginning_is_shared() -> None:
    one, two, other = (
        step("one", "cat a.txt > log", "echo 1 >> log"),
        step("two", "echo 2 >> log"),
        step("o", "rm log"),
    )

    async def use(pool: Pool, setups: SetUps, events: Events) -> None:
        assert await look(pool, setups, setup(one, two), "cat log") == "of the task\n1\n2\n"
        assert setups.counts.made == 2 and setups.counts.bytes > 0
        assert await look(pool, setups, setup(one, two), "cat log; echo mine > log") == "of the task\n1\n2\n"
        assert await look(pool, setups, setup(one, two), "cat log") == "of the task\n1\n2\n", (
            "boxes share no state"
        )
        assert await look(pool, setups, setup(one), "cat log") == "of the task\n1\n"
        assert await look(pool, setups, setup(one, other), "ls") == "a.txt\n"
        assert setups.counts.made == 3
        assert await look(pool, setups, setup(one, files={"a.txt": b"others\n"}), "cat log") == "others\n1\n"
        assert await look(pool, setups, setup(two, one), "cat log") == "of the task\n1\n"
        assert setups.counts.made == 6
        ran = [event for event in events.seen if event.get("phase") == "setup" and "verdict" in event]
        assert len(ran) == 9 and {event["verdict"] for event in ran} == {"ok"}

    on_pool(use)


def test_who_asks_at_once_waits_for_the_same_and_a_cancelled_first_fails_nobody() -> None:
    slow = setup(step("slow", "sleep 0.5; echo done > log"))

    async def use(pool: Pool, setups: SetUps, events: Events) -> None:
        first = asyncio.create_task(look(pool, setups, slow, "cat log"))
        await asyncio.sleep(0.2)
        others = [asyncio.create_task(look(pool, setups, slow, "cat log")) for _ in range(4)]
        await asyncio.sleep(0.05)
        first.cancel()
        assert await asyncio.gather(*others) == ["done\n"] * 4
        with pytest.raises(asyncio.CancelledError):
            await first
        assert setups.counts.made == 1 and sum("sleep" in program for program in events.programs) == 1
        only = asyncio.create_task(look(pool, setups, setup(step("x", "sleep 0.3")), "true"))
        await asyncio.sleep(0.1)
        only.cancel()
        assert await look(pool, setups, setup(step("x", "sleep 0.3")), "echo ok") == "ok\n"
        assert setups.counts.made == 2, "what nobody waits for any more is finished and kept"

    on_pool(use)


def test_a_pool_of_one_box_is_enough() -> None:
    async def run() -> None:
        pool = Pool(warm=0, limit=1)
        steps = setup(step("one", "echo 1 > one"), step("two", "echo 2 > two"))

        async def attempt() -> bytes:
            async with pool.prepared(SMALL, steps) as snapshot, pool.lease(SMALL, snapshot=snapshot) as box:
                return (await box.exec(["cat", "one", "two"])).stdout

        assert await asyncio.gather(*(attempt() for _ in range(4))) == [b"1\n2\n"] * 4
        await pool.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("failing", "words"),
    [
        (
            step("build", "echo begun; echo why >&2; exit 3"),
            "'build' failed.*verdict exit, exit code 3.*begun | why",
        ),
        (step("build", "sleep 20", timeout_s=0.3), "verdict timeout_wall, no exit code"),
        (step("build", "head -c 20M /dev/zero > big"), "verdict disk"),
        (
            step("build", "true", "sleep 0.4; true", "sleep 20", timeout_s=1.0),
            "failed at 'sleep 20'.*within 1 s",
        ),
    ],
)
def test_a_step_that_fails_is_named_and_its_state_is_not_kept(failing: SetupStep, words: str) -> None:
    async def use(pool: Pool, setups: SetUps, events: Events) -> None:
        with pytest.raises(SetupFailed, match=words):
            await look(pool, setups, setup(step("fine", "true"), failing), "true")
        assert setups.counts.made == 1 and pool.leased == 0
        assert await look(pool, setups, setup(step("fine", "true")), "echo ok") == "ok\n"

    on_pool(use)


def test_what_was_not_used_for_longest_goes_first_but_nothing_that_is_in_use() -> None:
    async def use(pool: Pool, setups: SetUps, events: Events) -> None:
        all_of_them = [setup(step(name, f"echo {name} > log")) for name in "abcd"]
        a, b, c, d = all_of_them
        for each in (a, b):
            await look(pool, setups, each, "true")
        await look(pool, setups, a, "true")
        await look(pool, setups, c, "true")
        assert setups.counts.made == 3 and setups.counts.discarded == 1
        await look(pool, setups, a, "true")
        assert setups.counts.made == 3, "a was used after b"
        async with setups.ready(SMALL, a) as held, setups.ready(SMALL, b), setups.ready(SMALL, c):
            await look(pool, setups, d, "true")
            box = await pool.acquire(SMALL, snapshot=held)
            assert (await box.read("log")) == b"a\n"
            await pool.release(box)
        assert setups.counts.made - setups.counts.discarded == 2
        made = setups.counts.made
        await look(pool, setups, d, "true")
        assert setups.counts.made == made

    on_pool(use, most=2)


def test_bytes_are_bounded_and_one_that_is_too_large_is_kept_until_the_next() -> None:
    async def use(pool: Pool, setups: SetUps, events: Events) -> None:
        large, small = setup(step("l", "head -c 4M /dev/zero > z")), setup(step("s", "true"))
        assert await look(pool, setups, large, "stat -c %s z") == "4194304\n"
        assert setups.counts.bytes >= 4 << 20
        assert await look(pool, setups, large, "stat -c %s z") == "4194304\n" and setups.counts.made == 1
        await look(pool, setups, small, "true")
        assert setups.counts.bytes < 1 << 20 and setups.counts.discarded == 1

    on_pool(use, most_bytes=1 << 20)


def test_closing_ends_what_runs_and_says_so() -> None:
    async def run() -> None:
        pool = Pool(warm=0)

        async def attempt() -> None:
            async with pool.prepared(SMALL, setup(step("slow", "sleep 20"))):
                raise AssertionError("it never gets here")

        waiting = asyncio.create_task(attempt())
        await asyncio.sleep(0.4)
        await asyncio.wait_for(pool.close(), 5)
        with pytest.raises(SandboxError, match="the pool was closed while a set-up ran"):
            await waiting
        with pytest.raises(SandboxError, match="closed"):
            await attempt()

    asyncio.run(run())


def test_a_state_whose_holder_ended_is_made_again() -> None:
    async def use(pool: Pool, setups: SetUps, events: Events) -> None:
        what = setup(step("one", "echo 1 > log"))
        assert await look(pool, setups, what, "cat log") == "1\n"
        (zygote,) = pool._backend._zygotes.values()  # type: ignore[attr-defined]
        await zygote.close()
        assert await look(pool, setups, what, "cat log") == "1\n"
        assert setups.counts.made == 2

    on_pool(use)


def test_a_set_up_without_steps_is_a_mistake() -> None:
    async def use(pool: Pool, setups: SetUps, events: Events) -> None:
        with pytest.raises(SandboxError, match="without a step"):
            await look(pool, setups, setup(), "true")

    on_pool(use)


def test_steps_reach_no_host_and_boxes_of_their_state_may() -> None:
    async def use(pool: Pool, setups: SetUps, events: Events) -> None:
        open_to_one = replace(SMALL, allow_hosts=("a.test",))
        what = setup(step("one", "echo ${http_proxy-none} > proxy"))
        async with (
            setups.ready(open_to_one, what) as snapshot,
            pool.lease(open_to_one, snapshot=snapshot) as box,
        ):
            assert await box.read("proxy") == b"none\n"
            result = await box.exec(["sh", "-c", "echo $http_proxy"])
            assert result.stdout == b"http://127.0.0.1:3128\n"
        async with setups.ready(SMALL, what) as snapshot, pool.lease(SMALL, snapshot=snapshot):
            assert setups.counts.made == 1

    on_pool(use)
