"""Snapshots on bubblewrap: what a box wrote comes back, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from lehr.core.errors import DeadlineExceeded
from lehr.sandbox.base import Limits, Spec
from lehr.sandbox.box import RunnerBox
from lehr.sandbox.bwrap import BwrapBackend
from lehr.sandbox.errors import Refused, SandboxError
from lehr.sandbox.pool import Pool

SMALL = Spec(limits=Limits(memory_bytes=128 << 20, disk_bytes=8 << 20, inodes=512, wall_s=10.0))
LIST = """
find /work /tmp /dev/shm -type d -printf '%p %y %m\\n' -o -printf '%p %y %m %s %l %n %T@\\n' | sort
find /work -type f -readable -exec sha1sum {} + | sort
"""
MAKE = """
set -e
mkdir -p a/b 'odd name'
echo one > a/b/file
ln a/b/file a/hard
ln -s /etc/passwd link
ln -s gone dangling
mkfifo fifo
printf '\\0\\377' > "$(printf 'odd name/n\\n\\377')"
truncate -s 1M sparse
chmod 000 a/hard
chmod 750 a
chmod 1700 .
echo t > /tmp/t
echo s > /dev/shm/s
"""
CHANGE = """
rm -r a; mkdir a; echo two > a/new; rm /tmp/t; echo more >> /dev/shm/s; chmod 755 .; rm fifo; echo f > fifo
"""


def on_backend(
    use: Callable[[BwrapBackend, RunnerBox], Awaitable[None]], *, limited: bool | None = None
) -> None:
    async def run() -> None:
        backend = BwrapBackend(limited=limited)
        box = await backend.create(SMALL)
        try:
            await use(backend, box)
        finally:
            await box.destroy()
            await backend.close()

    asyncio.run(run())


async def sh(box: RunnerBox, command: str) -> str:
    result = await box.exec(["sh", "-c", command])
    return (result.stdout + result.stderr).decode(errors="backslashreplace")


@pytest.mark.parametrize("limited", [None, False])
def test_the_recorded_disk_comes_back(limited: bool | None) -> None:
    async def use(backend: BwrapBackend, box: RunnerBox) -> None:
        assert await sh(box, MAKE) == ""
        first = await sh(box, LIST)
        one = await box.snapshot()
        assert await sh(box, LIST) == first, "a snapshot changes nothing"
        assert await sh(box, CHANGE) == ""
        second = await sh(box, LIST)
        two = await box.snapshot()
        await sh(box, "rm -rf /work/* /tmp/*")
        for snapshot, expected in ((one, first), (two, second), (one, first)):
            await box.restore(snapshot)
            assert await sh(box, LIST) == expected
        await sh(box, "echo three > a/b/three; rm a/hard")
        third = await sh(box, LIST)
        three = await box.snapshot()
        await one.discard()
        await box.restore(two)
        assert await sh(box, LIST) == second
        other = await backend.create(SMALL, three)
        assert await sh(other, LIST) == third, "a layer lives as long as one that stands on it"
        await other.destroy()
        for snapshot in (two, three):
            await snapshot.discard()

    on_backend(use, limited=limited)


def test_s34_after_a_rollback_no_file_process_mount_environment_or_clock_survives() -> None:
    async def use(backend: BwrapBackend, box: RunnerBox) -> None:
        look = (
            "set -- /proc/[0-9]*; echo $#; env | sort; ls -A /work /tmp /dev/shm; cat /proc/self/timens_offsets"
        )
        mark = await box.snapshot()
        before = await sh(box, look)
        shell = await box.shell()
        await shell.run("export LEFT=1; cd /tmp; (setsid sleep 300 &) ; trap '' TERM")
        await sh(box, "nohup sleep 300 >/dev/null 2>&1 & echo x > /work/x; echo y > /tmp/y; mkdir /dev/shm/z")
        mounts = await sh(box, "wc -l < /proc/self/mounts")
        await box.restore(mark)
        assert await sh(box, look) == before
        assert await sh(box, "wc -l < /proc/self/mounts") == mounts
        assert (await shell.run("echo $LEFT")).verdict == "broken"
        fresh = await box.shell()
        assert (await fresh.run("echo [$LEFT]; pwd")).stdout == b"[]\n/work\n"
        await mark.discard()

    on_backend(use)


def test_s35_boxes_of_one_snapshot_draw_different_numbers() -> None:
    draw = (
        "import os, random, uuid, secrets; random.seed(); print(os.urandom(8).hex(), random.random(), "
        "uuid.uuid4(), uuid.uuid1(), secrets.token_hex(8), open('/proc/sys/kernel/random/uuid').read())"
    )

    async def use(backend: BwrapBackend, box: RunnerBox) -> None:
        await box.exec(["python3", "-c", draw])
        mark = await box.snapshot()
        seen: list[bytes] = []
        boxes = [await backend.create(SMALL, mark) for _ in range(3)]
        for each in boxes:
            for program in (["python3"], ["/usr/bin/env", "python3"]):
                result = await each.exec([*program, "-c", draw])
                assert result.verdict == "ok", result
                seen += result.stdout.split()
            await each.destroy()
        assert len(seen) == len(set(seen))
        assert len({each.id for each in boxes}) == 3

    on_backend(use)


def test_without_a_seed_of_its_own_a_script_draws_fresh_numbers() -> None:
    async def use(backend: BwrapBackend, box: RunnerBox) -> None:
        draws = {
            (await box.exec(["python3", "-c", "import random; print(random.random())"])).stdout
            for _ in range(5)
        }
        assert len(draws) == 5

    on_backend(use)


def test_restoring_ends_what_runs() -> None:
    async def use(backend: BwrapBackend, box: RunnerBox) -> None:
        mark = await box.snapshot()
        running = asyncio.create_task(box.exec(["sleep", "60"]))
        await asyncio.sleep(0.2)
        await box.restore(mark)
        result = await asyncio.wait_for(running, 2)
        assert result.verdict == "broken"
        assert (await box.exec(["echo", "on"])).stdout == b"on\n"

    on_backend(use)


async def number(box: RunnerBox, name: str) -> int:
    """Read a file that is replaced again and again."""
    while True:
        try:
            return int(await box.read(name))
        except Refused:  # replaced between opening and looking
            await asyncio.sleep(0.01)


def test_programs_stand_still_while_they_are_recorded_and_go_on() -> None:
    count = "i=0; while :; do i=$((i+1)); echo $i > n; mv n one; echo $i > n; mv n two; done"

    async def use(backend: BwrapBackend, box: RunnerBox) -> None:
        shell = await box.shell()
        await shell.run(f"({count}) >/dev/null 2>&1 &")
        await asyncio.sleep(0.2)
        mark = await box.snapshot()
        before = await number(box, "two")
        await asyncio.sleep(0.3)
        assert await number(box, "two") > before
        await box.restore(mark)
        one, two = await number(box, "one"), await number(box, "two")
        assert 0 <= one - two <= 1

    on_backend(use)


def test_what_cannot_be_recorded_is_refused_and_the_box_works_on() -> None:
    async def use(backend: BwrapBackend, box: RunnerBox) -> None:
        mark = await box.snapshot()
        deep = "import os\nfor _ in range(300): os.mkdir('d'); os.chdir('d')"
        assert (await box.exec(["python3", "-c", deep])).verdict == "ok"
        with pytest.raises(SandboxError, match="cannot record the box's disk: File name too long"):
            await box.snapshot()
        assert (await box.exec(["echo", "on"])).stdout == b"on\n"
        other = Spec(limits=Limits(pids=9))
        with pytest.raises(SandboxError, match="of another spec"):
            await backend.create(other, mark)
        assert (await box.exec(["echo", "on"])).stdout == b"on\n"

    on_backend(use)


def test_disk_limits_hold_over_a_snapshot() -> None:
    async def use(backend: BwrapBackend, box: RunnerBox) -> None:
        await sh(box, "head -c 6M /dev/zero > six")
        mark = await box.snapshot()
        await box.restore(mark)
        result = await box.exec(["sh", "-c", "head -c 9M /dev/zero > nine"])
        assert result.verdict == "disk"
        assert len(await box.read("six", limit_bytes=8 << 20)) == 6 << 20

    on_backend(use)


def test_a_released_box_leaves_its_snapshot_to_others() -> None:
    async def run() -> None:
        pool = Pool(warm=0)
        box = await pool.acquire(SMALL)
        await box.write("state", b"kept")
        mark = await pool.release(box, snapshot=True)
        with pytest.raises(SandboxError, match="was released"):
            await pool.release(box, snapshot=True)
        async with pool.lease(SMALL, snapshot=mark) as one, pool.lease(SMALL, snapshot=mark) as two:
            await one.write("state", b"changed")
            assert await two.read("state") == b"kept"
            assert one.origin.obtained == "snapshot"
        await mark.discard()
        await pool.close()

    asyncio.run(run())


def test_what_a_snapshot_wants_to_run_first_runs_in_each_box() -> None:
    async def run() -> None:
        pool = Pool("bwrap", warm=0)
        try:
            async with pool.lease(SMALL) as box:
                await box.write("seed", b"old")
                mark = await box.snapshot(on_restore=["sh", "-c", "head -c 8 /dev/urandom > seed"])
                bad = await box.snapshot(on_restore=["false"])
                slow = await box.snapshot(on_restore=["sleep", "2"])
                with pytest.raises(TypeError, match="expected a list"):
                    await box.snapshot(on_restore="true")
                await box.restore(mark)
                seeds = {await box.read("seed")}
            for _ in range(2):
                async with pool.lease(SMALL, snapshot=mark) as twin:
                    seeds.add(await twin.read("seed"))
            assert len(seeds) == 3 and b"old" not in seeds
            with pytest.raises(SandboxError, match=r"false failed after .* was restored"):
                await pool.acquire(SMALL, snapshot=bad)
            with pytest.raises(DeadlineExceeded, match="a restored box was not ready"):
                await pool.acquire(SMALL, snapshot=slow, timeout_s=0.3)
            assert pool.leased == 0
        finally:
            await pool.close()

    asyncio.run(run())


def test_a_discarded_snapshot_is_refused_and_the_box_lives_on() -> None:
    async def run() -> None:
        pool = Pool("bwrap", warm=0)
        try:
            async with pool.lease(SMALL) as box:
                mark = await box.snapshot()
                await mark.discard()
                with pytest.raises(SandboxError, match="was discarded"):
                    await box.restore(mark)
                assert (await box.exec(["true"])).verdict == "ok"
                with pytest.raises(SandboxError, match="was discarded"):
                    await pool.acquire(SMALL, snapshot=mark)
                assert pool.leased == 1
        finally:
            await pool.close()

    asyncio.run(run())
