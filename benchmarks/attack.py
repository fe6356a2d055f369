"""The host under attack: what the neighbours of hostile programs feel.

``attack.exec_p99_ms``: the slowest percent of execs in a quiet box while eight others run a fork bomb, memory
bombs, a full disk, endless output, busy loops and sleeps; beside the same box when nobody attacks. The ratio is
theirs over ours, so 0.2 is five times as slow.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

from benchmarks.row import Row

from lehr.core.errors import LehrError
from lehr.sandbox.base import Box, Limits, Spec
from lehr.sandbox.pool import Pool

ATTACKS = (
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "import mmap\nx = []\nwhile True: x.append(mmap.mmap(-1, 1 << 22, flags=0x8022))",
    "f = open('fill', 'wb')\nwhile True:\n    try: f.write(b'x' * 65536)\n    except OSError: f.seek(0)",
    "import os\nwhile True: os.write(1, b'\\x00\\xff' * 32768)",
    "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "import time\nwhile True: time.sleep(0.001)",
    "import threading\ndef f():\n    while True: pass\nfor _ in range(40): threading.Thread(target=f).start()",
)
SPEC = Spec(limits=Limits(memory_bytes=128 << 20, wall_s=3.0, cpu_s=3.0))
EXECS, SETTLE_S = 400, 1.0


def rows() -> Iterator[Row]:
    """Yield the row, in the order of the module's docstring."""
    quiet, attacked = asyncio.run(_measure())
    yield Row.duration("attack.exec_p99_ms", attacked, "ms", "unattacked", quiet)


async def _measure() -> tuple[float, float]:
    pool = Pool(warm=2, limit=9)
    try:
        async with pool.lease(SPEC) as box:
            await _p99(box, EXECS // 4)
            quiet = await _p99(box, EXECS)
            attackers = [asyncio.create_task(_attack(pool, code)) for code in ATTACKS]
            try:
                await asyncio.sleep(SETTLE_S)
                attacked = await _p99(box, EXECS)
            finally:
                for attacker in attackers:
                    attacker.cancel()
                await asyncio.gather(*attackers, return_exceptions=True)
        return quiet, attacked
    finally:
        await pool.close()


async def _attack(pool: Pool, code: str) -> None:
    """Attack again and again, in a box of its own each time."""
    while True:
        with contextlib.suppress(LehrError):
            async with pool.lease(SPEC) as box:
                await box.exec(["python3", "-c", code])


async def _p99(box: Box, count: int) -> float:
    taken: list[float] = []
    for _ in range(count):
        begun = time.perf_counter()
        result = await box.exec(["/bin/echo", "x"])
        taken.append(1e3 * (time.perf_counter() - begun))
        assert result.verdict == "ok", result
        await asyncio.sleep(0.005)
    return sorted(taken)[int(0.99 * count)]
