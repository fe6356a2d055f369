"""Leases with random faults, and a count of what is left behind.

    python tests/soak/leases.py [LEASES]        10,000 without an argument

Each lease ends in one of many ways: as it should, killed from outside, out of memory or processes, at its
time limit, by a caller that is cancelled at any moment, with shells open, after snapshots. Processes, mounts,
control groups, descriptors and disk are counted before and after; every lease must come to an end, and every
place of the pool must be free again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from lehr.core.errors import LehrError
from lehr.sandbox.base import Limits, Spec
from lehr.sandbox.lease import LeasedBox
from lehr.sandbox.places import find_places
from lehr.sandbox.pool import Pool

MIB = 1 << 20
SPEC = Spec(
    limits=Limits(memory_bytes=96 * MIB, disk_bytes=4 * MIB, inodes=256, pids=16, wall_s=4.0, cpu_s=0.4)
)
AT_ONCE, LIMIT, WARM = 6, 4, 2
BOMB = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
HOARD = "x = []\nwhile True: x.append(bytearray(1 << 20))"
DAEMON = "(setsid sleep 300 &) ; nohup sleep 300 >/dev/null 2>&1 & echo started"
Fault = Callable[[LeasedBox, random.Random], Awaitable[None]]


@dataclass(frozen=True)
class Held:
    """What this process and its boxes take from the host. disk_bytes, folders: in its own temporary folder, and
    what anybody has in /dev/shm in units of 16 MiB.
    """

    processes: int
    mounts: int
    groups: int
    descriptors: int
    disk_bytes: int
    shared_memory: int
    folders: int

    @classmethod
    def now(cls) -> Held:
        """Count. Mounts are those of every namespace below this process."""
        below = _below(os.getpid())
        spaces: dict[int, int] = {}
        for pid in below:
            with contextlib.suppress(OSError):  # one that has just ended
                lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
                spaces[os.stat(f"/proc/{pid}/ns/mnt").st_ino] = len(lines)
        mounts = sum(spaces.values())
        owned = f"-{os.getpid()}-"
        folders = [place.folder.iterdir() for place in find_places().controllers.values()]
        groups = sum(owned in path.name for group in folders for path in group)
        left = list(Path(tempfile.gettempdir()).rglob("*"))
        disk = sum(path.lstat().st_blocks * 512 for path in left)
        shared = shutil.disk_usage("/dev/shm").used // (16 * MIB)
        return cls(len(below), mounts, groups, len(os.listdir("/proc/self/fd")), disk, shared, len(left))


def _below(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            found += [child, *_below(child)]
    return found


async def use(box: LeasedBox, dice: random.Random) -> None:
    """As it should be."""
    await box.write("in", b"x" * 1000)
    result = await box.exec(["python3", "-c", "print(open('in').read())"])
    assert result.verdict == "ok" and len(result.stdout) == 1001, result
    await box.read("in")


async def die(box: LeasedBox, dice: random.Random) -> None:
    """Process 1 is killed while a program runs."""
    running = asyncio.create_task(box.exec(["sleep", "1"]))
    await asyncio.sleep(0.03 * dice.random())
    process = box._box._process._handle  # type: ignore[attr-defined]
    with contextlib.suppress(OSError):
        signal.pidfd_send_signal(process._pidfd, signal.SIGKILL)
    assert (await running).verdict in ("broken", "timeout_wall")


async def hoard(box: LeasedBox, dice: random.Random) -> None:
    """Out of memory."""
    assert (await box.exec(["python3", "-c", HOARD])).verdict in ("oom", "timeout_wall", "timeout_cpu")


async def bomb(box: LeasedBox, dice: random.Random) -> None:
    """Out of processes."""
    assert (await box.exec(["python3", "-c", BOMB])).verdict in (
        "pids",
        "timeout_wall",
        "timeout_cpu",
        "broken",
    )


async def late(box: LeasedBox, dice: random.Random) -> None:
    """At the time limit."""
    assert (await box.exec(["sleep", "9"], timeout_s=0.05)).verdict == "timeout_wall"


async def daemons(box: LeasedBox, dice: random.Random) -> None:
    """A shell is left open, and daemons with it."""
    shell = await box.shell()
    await shell.run(DAEMON)


async def roll_back(box: LeasedBox, dice: random.Random) -> None:
    """A snapshot is taken, restored and sometimes left to the pool's end."""
    await box.write("state", b"one")
    mark = await box.snapshot()
    await box.write("state", b"two")
    await box.restore(mark)
    assert await box.read("state") == b"one"
    await mark.discard()


FAULTS: tuple[tuple[Fault, int], ...] = (
    (use, 60), (die, 6), (hoard, 3), (bomb, 2), (late, 6), (daemons, 4), (roll_back, 4)
)  # fmt: skip


async def lease(pool: Pool, dice: random.Random, ends: Counter[str]) -> None:
    """One lease with one fault; a fifth of the callers is cancelled at some moment."""
    (fault,) = dice.choices([f for f, _ in FAULTS], [w for _, w in FAULTS])

    async def whole() -> None:
        async with pool.lease(SPEC, timeout_s=30.0) as box:
            await fault(box, dice)

    task = asyncio.create_task(whole())
    if dice.random() < 0.2:
        await asyncio.wait([task], timeout=0.06 * dice.random())
        task.cancel()
    try:
        await task
        ends[fault.__name__] += 1
    except asyncio.CancelledError:
        ends["cancelled"] += 1
    except LehrError as error:
        ends[f"refused: {error.what}"] += 1


async def soak(count: int, seed: int = 0) -> tuple[Held, Held, Counter[str]]:
    """Return what was held before and after ``count`` leases, and how they ended."""
    ends: Counter[str] = Counter()
    dice = random.Random(seed)
    begun = time.monotonic()
    pool = Pool(warm=WARM, limit=LIMIT)
    async with pool.lease(SPEC):  # what is made once is there
        pass
    await pool.close()
    before = Held.now()
    pool = Pool(warm=WARM, limit=LIMIT)
    left = count

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await lease(pool, dice, ends)
            done = count - left
            if done % 500 == 0:
                rate = done / (time.monotonic() - begun)
                print(f"  {done} of {count}, {rate:.0f} a second, {left / rate:.0f} s left", file=sys.stderr)

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    assert pool.leased == 0 and pool.waiting == 0
    boxes = [await pool.acquire(SPEC, timeout_s=5.0) for _ in range(LIMIT)]  # no place was lost
    for box in boxes:
        await pool.release(box)
    await pool.close()
    await asyncio.sleep(0.2)
    return before, Held.now(), ends


def main(argv: list[str]) -> int:
    """Soak, print what was seen, and fail if anything is left."""
    count = int(argv[0]) if argv else 10_000
    with tempfile.TemporaryDirectory(prefix="lehr-soak-") as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        before, after, ends = asyncio.run(soak(count))
    for name, number in ends.most_common():
        print(f"  {number:6d}  {name}")
    print(f"  {ends.total():6d}  in all")
    for name, value in asdict(before).items():
        print(f"  {name:14} {value} before, {asdict(after)[name]} after")
    return 0 if before == after and ends.total() == count else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
