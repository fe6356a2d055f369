"""The sandbox's parts by themselves: names of verdicts, cgroup files, pipes, files, filter, host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
import sys
from pathlib import Path

import pytest

from lehr.core.errors import UnknownName
from lehr.sandbox import cgroup, collect, host, image, seccomp
from lehr.sandbox.base import Limits, Verdict
from lehr.sandbox.errors import Refused
from lehr.sandbox.inside import files
from lehr.sandbox.places import Place, Places, find_places, mounts, own_paths, sweep
from lehr.sandbox.pool import Pool
from lehr.sandbox.streams import CHUNK, PAUSE_S, Capture, Feeder
from lehr.sandbox.verdict import Signs, name

KILLED = -int(signal.SIGKILL)


@pytest.mark.parametrize(
    ("signs", "verdict"),
    [
        (Signs(0), "ok"),
        (Signs(3), "exit"),
        (Signs(-int(signal.SIGSEGV)), "signal"),
        (Signs(KILLED), "signal"),
        (Signs(KILLED, ended_by="wall"), "timeout_wall"),
        (Signs(KILLED, ended_by="cpu"), "timeout_cpu"),
        (Signs(-int(signal.SIGXCPU)), "timeout_cpu"),
        (Signs(KILLED, ended_by="output"), "output"),
        (Signs(1, refused_pids=3), "pids"),
        (Signs(0, refused_pids=3), "ok"),
        (Signs(KILLED, oom_kills=1), "oom"),
        (Signs(0, oom_kills=1), "ok"),
        (Signs(1, full=True), "disk"),
        (Signs(0, full=True), "ok"),
        (Signs(-int(signal.SIGXFSZ)), "disk"),
        (Signs(1, stderr=b"MemoryError\n"), "exit"),
        (Signs(1, stderr=b"MemoryError\n", limited=False), "oom"),
        (Signs(0, stderr=b"MemoryError\n", limited=False), "ok"),
        (Signs(1, peak_pids=64, peak_bytes=1 << 40, limited=False), "pids"),
        (Signs(1, stderr=b"can't start new thread", limited=False), "pids"),
        (Signs(KILLED, peak_bytes=1 << 40, limited=False), "oom"),
        (Signs(127, ended_by="start:2"), "exit"),
        (Signs(127, ended_by="start:11"), "broken"),
    ],
)
def test_verdict_names_what_ended_it(signs: Signs, verdict: Verdict) -> None:
    word, code, number, detail = name(signs, Limits(), 1.0)
    assert word == verdict
    assert (detail == "") == (word == "ok" and not signs.full)
    assert code is None or number is None


def test_cgroup_mounts_and_paths_are_read_on_every_kind_of_host() -> None:
    text = (
        "30 25 0:26 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
        "31 25 0:27 /docker/x /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
        "32 25 0:28 / /sys/fs/cgroup/uni\\040fied rw - cgroup2 cgroup2 rw,nsdelegate\n"
        "33 25 0:29 / /proc rw - proc proc rw\n"
    )
    assert mounts(text) == [
        ("cgroup", "/", "/sys/fs/cgroup/memory", "rw,memory"),
        ("cgroup", "/docker/x", "/sys/fs/cgroup/cpu,cpuacct", "rw,cpu,cpuacct"),
        ("cgroup2", "/", "/sys/fs/cgroup/uni fied", "rw,nsdelegate"),
    ]
    paths = own_paths("4:memory:/a\n3:cpu,cpuacct:/docker/x/y\n0::/user.slice\n")
    assert paths == {"memory": "/a", "cpu": "/docker/x/y", "cpuacct": "/docker/x/y", "": "/user.slice"}


def test_cgroup_folder_of_version_2_is_limited_and_read(tmp_path: Path) -> None:
    names = ("memory.max", "memory.swap.max", "pids.max", "cpu.max")
    place = Place(2, tmp_path)
    places = Places("v2", {"memory": place, "pids": place, "cpu": place}, place)
    group = cgroup.Group(places, Limits(memory_bytes=100 << 20, pids=9, cpu=1.5))
    (folder,) = group.folders
    assert {file: (folder / file).read_text() for file in names} == {
        "memory.max": str((100 << 20) + cgroup.ALLOWANCE_BYTES),
        "memory.swap.max": "0",
        "pids.max": str(9 + cgroup.OWN_PIDS),
        "cpu.max": "150000 100000",
    }
    (folder / "cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    (folder / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    (folder / "pids.events").write_text("max 5\n")
    (folder / "memory.current").write_text("77\n")
    (folder / "memory.peak").write_text("99\n")
    assert (group.cpu_s(), group.oom_kills(), group.refused_pids()) == (2.5, 2, 5)
    assert (group.memory_now(), group.memory_peak()) == (77, 99)
    assert group.doors == [str(folder / "cgroup.procs")]


def test_s40_groups_of_a_dead_owner_are_removed(tmp_path: Path) -> None:
    namespace = os.readlink("/proc/self/ns/pid").strip("pid:[]")
    dead = tmp_path / f"lehr-{namespace}-4194300-1-0"
    stale = tmp_path / f"lehr-{namespace}-{os.getpid()}-1-0"
    elsewhere = tmp_path / "lehr-1-4194300-1-0"
    for folder in (dead, stale, elsewhere):
        folder.mkdir()
    place = Place(1, tmp_path)
    group = tmp_path / f"lehr-{namespace}-{os.getpid()}-{Path('/proc/self/stat').read_text().split()[21]}-0"
    group.mkdir()
    assert sweep(Places("v1", {"memory": place})) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([elsewhere.name, group.name])


def test_capture_keeps_head_and_tail() -> None:
    async def run() -> None:
        read, write = os.pipe2(os.O_NONBLOCK)
        capture = Capture(asyncio.get_running_loop(), read, 100)
        data = bytes(range(256)) * 1000
        sent = 0
        while sent < len(data):
            try:
                sent += os.write(write, data[sent : sent + 5000])
            except BlockingIOError:
                await asyncio.sleep(0)
        os.close(write)
        await capture.ended
        assert capture.take() == (data[:50] + data[-50:], True)

    asyncio.run(run())


def test_capture_gives_back_short_output_whole() -> None:
    async def run() -> None:
        read, write = os.pipe2(os.O_NONBLOCK)
        capture = Capture(asyncio.get_running_loop(), read, 100)
        for part in (b"a" * 60, b"b" * 40):
            os.write(write, part)
            capture.drain()
        assert capture.take() == (b"a" * 60 + b"b" * 40, False)
        os.write(write, b"next")
        capture.drain()
        assert capture.take() == (b"next", False)
        capture.close()
        os.close(write)

    asyncio.run(run())


def test_a_flood_is_taken_at_a_pace_and_the_loop_stays_free() -> None:
    async def run() -> None:
        read, write = os.pipe2(os.O_NONBLOCK)
        loop = asyncio.get_running_loop()
        capture = Capture(loop, read, 100)
        turns = 0
        deadline = loop.time() + 0.2
        while loop.time() < deadline:
            with contextlib.suppress(BlockingIOError):
                os.write(write, b"x" * CHUNK)
            await asyncio.sleep(0)
            turns += 1
        reads = capture.total / CHUNK
        assert 10 < reads <= 0.2 / PAUSE_S + 2 < turns
        os.close(write)
        await asyncio.wait_for(capture.ended, 1.0)

    asyncio.run(run())


def test_feeder_ends_when_the_reader_is_gone() -> None:
    async def run() -> None:
        read, write = os.pipe2(os.O_NONBLOCK)
        feeder = Feeder(asyncio.get_running_loop(), write, b"x" * (1 << 20))
        os.close(read)
        await asyncio.sleep(0.01)
        with pytest.raises(OSError):
            os.fstat(write)
        feeder.close()

    asyncio.run(run())


def test_take_refuses_a_file_that_grows_and_what_is_no_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    with path.open("rb") as handle:
        assert collect.take(handle.fileno(), "file", 5) == b"12345"
        with pytest.raises(Refused, match="5 bytes"):
            collect.take(handle.fileno(), "file", 4)
    with open("/dev/zero", "rb") as handle, pytest.raises(Refused, match="not a regular file"):
        collect.take(handle.fileno(), "zero", 4)


def test_paths_deeper_than_the_bound_are_refused() -> None:
    with pytest.raises(OSError, match="deeper"):
        files.folder("/".join(["d"] * 200))


def test_filters_check_the_calling_convention_first() -> None:
    for program in seccomp.programs():
        assert len(program) % 8 == 0
        code, _, _, offset = struct.unpack("HBBI", program[:8])
        assert (code, offset) == (0x20, 4)  # load the architecture of the call


def test_no_call_is_both_allowed_and_refused() -> None:
    allowed = seccomp.ALLOWED.split()
    assert len(allowed) == len(set(allowed))
    assert not set(allowed) & set(seccomp.DENIED.split())
    assert set(seccomp.UNCOUNTED.split()) <= set(allowed)


def test_report_of_this_host_is_complete() -> None:
    report = host.probe()
    assert report.fit, report.lacks
    assert report.bwrap and report.bwrap_version and report.libseccomp
    assert report.limited == find_places().usable
    assert report.limited or [lack.mend for lack in report.lacks if lack.name == "cgroups"]


def test_report_names_a_mend_for_each_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "PATH", "/nonexistent")
    monkeypatch.setattr(image, "system_python", lambda: None)
    report = host.probe()
    assert not report.fit
    mends = {lack.name: lack.mend for lack in report.lacks}
    assert mends["bubblewrap"] == "apt-get install bubblewrap"
    assert mends["python3"] == "apt-get install python3"
    for version in ("v1", "v2", "hybrid", "none"):
        assert len(host.cgroup_mend(version)) > 10


def test_unknown_backend_is_named_with_near_matches() -> None:
    with pytest.raises(UnknownName, match="'bwrap'"):
        Pool("bwrp")


def test_runner_modules_import_nothing_but_the_standard_library() -> None:
    for path in Path(files.__file__).parent.glob("*.py"):
        for line in path.read_text().splitlines():
            if line.startswith(("import ", "from ")):
                top = line.split()[1].split(".")[0]
                assert top in sys.stdlib_module_names or line.startswith("from lehr.sandbox.inside"), line
