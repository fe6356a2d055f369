"""Benchmarks of the sandbox, hardening on, every box used once and destroyed, refilling counted.

``sandbox.cold_p50_ms``: a new box, beside a bare ``bwrap`` of the same namespaces that runs ``true``.
``sandbox.cycles_per_s``: lease, a small Python script, release, as fast as they go; beside interpreter starts.
``sandbox.python_exec_p50_ms``: that script in a leased box, at 80 % of that rate; beside one interpreter start.
``sandbox.lease_warm_p50_ms``: from asking for a box to the end of ``echo`` in it, at 80 % of that rate; beside
the bare ``bwrap``.
``sandbox.rollback_p50_ms``: restoring a box to a snapshot of a small working folder; beside the bare ``bwrap``.
``sandbox.idle_box_mib``: memory of a box that waits, its share of shared pages included, with 500 of them alive
at once; beside what its interpreter alone takes.
``sandbox.gvisor_start_ms``, ``sandbox.gvisor_exec_ms``, ``sandbox.gvisor_checkpoint_ms`` and
``sandbox.gvisor_restore_ms``: a new box on gVisor, a small Python script in it, recording it with its memory
and going on, a new box from that; beside a bare ``runsc do true``. Left out where runsc is not installed.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import TypeVar

from benchmarks.row import Row

from lehr.core.errors import MissingDependency
from lehr.sandbox.base import Spec
from lehr.sandbox.gvisor import runsc
from lehr.sandbox.gvisor.backend import GvisorBackend
from lehr.sandbox.pool import Pool

BARE = (
    "bwrap", "--unshare-all", "--new-session", "--die-with-parent", "--cap-drop", "ALL",
    "--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib",
    "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp",
)  # fmt: skip
PYTHON = "/usr/bin/python3"
SCRIPT = (PYTHON, "-I", "-S", "-c", "print(6*7)")
ALTERNATIONS, SUSTAINED_S, WARM, IDLE = 40, 6.0, 8, 500
GVISOR_TURNS = 10
T = TypeVar("T")


def rows() -> Iterator[Row]:
    """Yield the rows, in the order of the module's docstring."""
    yield from asyncio.run(_rows())


async def _rows() -> list[Row]:
    cold, bare = await _cold()
    found = [Row.duration("sandbox.cold_p50_ms", cold, "ms", "bwrap true", bare)]
    rate, tail, starts = await _sustained()
    print(f"    p99 of a cycle {tail:.0f} ms at full load", file=sys.stderr)
    found.append(Row.throughput("sandbox.cycles_per_s", rate, "/s", "python3 -c pass", starts))
    leases, scripts = await _at(0.8 * rate)
    single = statistics.median(_timed([PYTHON, "-c", "pass"]) for _ in range(ALTERNATIONS))
    found.append(Row.duration("sandbox.python_exec_p50_ms", scripts, "ms", "python3 -c pass", single))
    found.append(Row.duration("sandbox.lease_warm_p50_ms", leases, "ms", "bwrap true", bare))
    found.append(Row.duration("sandbox.rollback_p50_ms", await _rollback(), "ms", "bwrap true", bare))
    found.append(Row.duration("sandbox.idle_box_mib", await _idle(), "MiB", "python3", _interpreter_mib()))
    return [*found, *await _gvisor()]


async def _gvisor() -> list[Row]:
    """Return the rows of gVisor, medians of repeated turns, or none with the reason."""
    try:
        program = runsc.find()
    except MissingDependency as error:
        print(f"    no rows of gVisor: {error}", file=sys.stderr)
        return []
    spent: dict[str, list[float]] = {}

    async def timed(name: str, work: Awaitable[T]) -> T:
        begun = time.perf_counter()
        result = await work
        spent.setdefault(name, []).append(1e3 * (time.perf_counter() - begun))
        return result

    backend = GvisorBackend()
    try:
        await (await backend.create(Spec())).destroy()
        for _ in range(GVISOR_TURNS):
            box = await timed("start", backend.create(Spec()))
            result = await timed("exec", box.exec(SCRIPT))
            assert result.stdout == b"42\n", result
            snapshot = await timed("checkpoint", box.snapshot())
            other = await timed("restore", backend.create(Spec(), snapshot))
            for each in (box, other):
                await each.destroy()
            await snapshot.discard()
            with tempfile.TemporaryDirectory() as root:
                bare = [program, *runsc.options(program), "--root", root, "do", "true"]
                spent.setdefault("bare", []).append(_timed(bare))
    finally:
        await backend.close()
    middle = {name: statistics.median(values) for name, values in spent.items()}
    return [
        Row.duration(f"sandbox.gvisor_{name}_ms", middle[name], "ms", "runsc do true", middle["bare"])
        for name in ("start", "exec", "checkpoint", "restore")
    ]


async def _cold() -> tuple[float, float]:
    """Return medians in ms of a new box and of a bare bwrap, taken in turns."""
    ours: list[float] = []
    theirs: list[float] = []
    pool = Pool(warm=0)
    try:
        for _ in range(ALTERNATIONS):
            begun = time.perf_counter()
            box = await pool.acquire(Spec())
            ours.append(1e3 * (time.perf_counter() - begun))
            await pool.release(box)
            theirs.append(_timed([*BARE, "true"]))
    finally:
        await pool.close()
    return statistics.median(ours[1:]), statistics.median(theirs[1:])


async def _sustained() -> tuple[float, float, float]:
    """Return cycles a second, the p99 of a cycle in ms, and interpreter starts a second, two at a time."""
    pool = Pool(warm=WARM, limit=WARM)
    spent: list[float] = []

    async def worker(end: float) -> None:
        while time.perf_counter() < end:
            begun = time.perf_counter()
            async with pool.lease(Spec()) as box:
                result = await box.exec(SCRIPT)
                assert result.stdout == b"42\n", result
            spent.append(1e3 * (time.perf_counter() - begun))

    try:
        await asyncio.gather(*(worker(time.perf_counter() + 1.0) for _ in range(4)))
        spent.clear()
        begun = time.perf_counter()
        await asyncio.gather(*(worker(begun + SUSTAINED_S) for _ in range(4)))
        rate = len(spent) / (time.perf_counter() - begun)
    finally:
        await pool.close()
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < 2.0:
        pair = [subprocess.Popen([PYTHON, "-c", "pass"]) for _ in range(2)]
        for process in pair:
            process.wait()
        count += 2
    return rate, _quantile(spent, 0.99), count / (time.perf_counter() - begun)


async def _at(rate: float) -> tuple[float, float]:
    """Return medians in ms at a steady rate of arrivals: asking to the end of ``echo``, and a script alone."""
    pool = Pool(warm=WARM, limit=4 * WARM)
    leases: list[float] = []
    scripts: list[float] = []

    async def one(number: int) -> None:
        begun = time.perf_counter()
        async with pool.lease(Spec()) as box:
            if number % 2:
                await box.exec(["/bin/echo", "ready"])
                leases.append(1e3 * (time.perf_counter() - begun))
            else:
                begun = time.perf_counter()
                await box.exec(SCRIPT)
                scripts.append(1e3 * (time.perf_counter() - begun))

    try:
        await asyncio.gather(*(one(n) for n in range(WARM)))
        await asyncio.sleep(0.5)
        leases.clear()
        scripts.clear()
        begun = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number in range(int(SUSTAINED_S * rate)):
                await asyncio.sleep(max(0.0, begun + number / rate - time.perf_counter()))
                tasks.create_task(one(number))
    finally:
        await pool.close()
    return statistics.median(leases), statistics.median(scripts)


async def _rollback() -> float:
    """Return the median in ms of bringing a changed folder of 20 files back."""
    pool = Pool(warm=0)
    taken: list[float] = []
    try:
        async with pool.lease(Spec()) as box:
            for number in range(20):
                await box.write(f"src/file{number}.py", b"x = 1\n" * 200)
            mark = await box.snapshot()
            for _ in range(ALTERNATIONS):
                await box.exec(["/bin/sh", "-c", "rm -r src; echo changed > other"])
                begun = time.perf_counter()
                await box.restore(mark)
                taken.append(1e3 * (time.perf_counter() - begun))
            assert len(await box.tree("src")) == 20
            await mark.discard()
    finally:
        await pool.close()
    return statistics.median(taken)


async def _idle() -> float:
    """Return MiB that each of ``IDLE`` waiting boxes adds."""
    pool = Pool(warm=0, limit=IDLE)
    before = set(_processes())
    try:
        for _ in range(IDLE):
            await pool.acquire(Spec())
        total = sum(map(_mib, set(_processes()) - before))
        print(f"    {IDLE} boxes alive at once take {total / 1024:.2f} GiB in all", file=sys.stderr)
        return total / IDLE
    finally:
        await pool.close()


def _interpreter_mib() -> float:
    """Return MiB of an interpreter that waits for input."""
    code = "import sys; print(); sys.stdout.flush(); sys.stdin.read()"
    command = [PYTHON, "-I", "-S", "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        return _mib(process.pid)


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _mib(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def _timed(command: list[str]) -> float:
    begun = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return 1e3 * (time.perf_counter() - begun)


def _quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
