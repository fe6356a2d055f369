"""The bwrap backend: what only a look from outside the box can show."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from lehr.core.errors import ConfigError, HostUnfit, MissingDependency
from lehr.sandbox import bwrap, image, launch, zygote
from lehr.sandbox.base import MOST, Limits, Spec
from lehr.sandbox.box import RunnerBox
from lehr.sandbox.bwrap import BwrapBackend
from lehr.sandbox.errors import Refused, SandboxError
from lehr.sandbox.lease import LeasedBox
from lehr.sandbox.places import find_places, sweep
from lehr.sandbox.pool import Pool

SMALL = Spec(limits=Limits(memory_bytes=128 << 20, disk_bytes=8 << 20, inodes=256, wall_s=10.0))


def in_box(use: Callable[[RunnerBox], Awaitable[Any]], spec: Spec = SMALL) -> Any:
    async def run() -> Any:
        backend = BwrapBackend()
        box = await backend.create(spec)
        try:
            return await use(box)
        finally:
            await box.destroy()
            await backend.close()

    return asyncio.run(run())


def processes_below(pid: int) -> list[int]:
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [inner for child in found for inner in processes_below(child)]


def process_1_of_box() -> int:
    """The host's number of the only box's process 1: two namespaces below this one, the zygote's is one."""
    (one,) = [
        pid
        for pid in processes_below(os.getpid())
        if (numbers := numbers_of(pid))[-1] == "1" and len(numbers) == len(numbers_of(os.getpid())) + 2
    ]
    return one


def numbers_of(pid: int) -> list[str]:
    """What a process is called in each namespace, from this one inwards."""
    return Path(f"/proc/{pid}/status").read_text().split("NSpid:")[1].split("\n")[0].split()


def test_s12_box_killed_from_outside() -> None:
    async def kill_while_running(box: RunnerBox) -> None:
        running = asyncio.create_task(box.exec(["sleep", "60"]))
        await asyncio.sleep(0.3)
        os.kill(process_1_of_box(), signal.SIGKILL)
        result = await asyncio.wait_for(running, 5)
        assert (result.verdict, result.exit_code) == ("broken", None)
        assert result.detail
        assert box.broken
        later = await box.exec(["true"])
        assert later.verdict == "broken"
        with pytest.raises(SandboxError):
            await box.read("anything")

    in_box(kill_while_running)


def test_pool_replaces_a_broken_warm_box() -> None:
    async def run() -> None:
        pool = Pool(warm=1)
        async with pool.lease(SMALL):
            pass
        while not pool.warm_boxes(SMALL):
            await asyncio.sleep(0.01)
        os.kill(process_1_of_box(), signal.SIGKILL)
        await asyncio.sleep(0.2)
        async with pool.lease(SMALL) as box:
            result = await box.exec(["echo", "fresh"])
            assert result.stdout == b"fresh\n"
        await pool.close()

    asyncio.run(run())


def test_nothing_is_left_after_destruction() -> None:
    places = find_places()
    descriptors = len(os.listdir("/proc/self/fd"))
    before = processes_below(os.getpid())  # of other tests in this process, such as multiprocessing's tracker

    async def use(box: RunnerBox) -> None:
        await box.exec(["sh", "-c", "sleep 60 & echo started"])
        shell = await box.shell()
        await shell.run("sleep 60 &")

    in_box(use)
    in_box(use)
    left = [pid for pid in processes_below(os.getpid()) if pid not in before]
    assert [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left] == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    for place in places.controllers.values():
        assert not [path for path in place.folder.glob("lehr-*") if f"-{os.getpid()}-" in path.name]


def test_cancelled_exec_kills_the_program_and_keeps_the_box() -> None:
    async def use(box: RunnerBox) -> None:
        running = asyncio.create_task(box.exec(["sleep", "60"]))
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        result = await box.exec(["sh", "-c", "ls /proc | grep -c '^[0-9]'"])
        assert result.verdict == "ok"
        assert int(result.stdout) <= 4

    in_box(use)


def test_program_starts_as_another_user_than_root() -> None:
    async def use(box: RunnerBox) -> None:
        running = asyncio.create_task(box.exec(["sleep", "5"]))
        await asyncio.sleep(0.3)
        uids = {
            os.stat(f"/proc/{pid}").st_uid for pid in processes_below(os.getpid()) if "sleep" in name_of(pid)
        }
        running.cancel()
        assert uids and 0 not in uids

    in_box(use)


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text()


def test_usage_counts_what_all_its_processes_did() -> None:
    code = """
import os
data = b"x" * (1 << 20)
for name in "abc":
    if os.fork() == 0:
        for _ in range(4):
            open(name, "wb").write(data)
        open(name, "rb").read()
        while os.times().user + os.times().system < 0.1: pass
        os._exit(0)
for _ in range(3): os.wait()
"""

    async def use(box: RunnerBox) -> None:
        usage = (await box.exec(["python3", "-c", code])).usage
        assert 12 << 20 <= usage.written_bytes < 14 << 20
        assert 3 << 20 <= usage.read_bytes < 6 << 20
        assert 0.3 <= usage.user_s + usage.system_s < 2 and usage.cpu_s >= 0.3
        assert 0 < usage.peak_bytes <= SMALL.limits.memory_bytes
        usage = (await box.exec(["true"])).usage
        assert usage.written_bytes < 1 << 20 and usage.cpu_s < 0.3

    in_box(use)


CALLS = """
import ctypes, errno, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    return errno.errorcode.get(ctypes.get_errno(), "done") if libc.syscall(number, *arguments) < 0 else "done"
print(call(9999), call(463, 0, 0), call(425, 1, None), call(39))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86-64")
def test_calls_that_nobody_has_looked_at_do_not_exist() -> None:
    async def use(box: RunnerBox) -> None:
        result = await box.exec(["python3", "-c", CALLS])
        assert result.stdout == b"ENOSYS ENOSYS EPERM done\n"

    in_box(use)


def test_landlock_and_filters_leave_a_box_its_own() -> None:
    code = """
import errno, os
def tried(path, flags):
    try:
        os.close(os.open(path, flags, 0o600))
        return "done"
    except OSError as error:
        return errno.errorcode[error.errno]
print(tried("/work/x", os.O_CREAT | os.O_WRONLY), tried("/tmp/x", os.O_CREAT | os.O_WRONLY),
      tried("/dev/shm/x", os.O_CREAT | os.O_WRONLY), tried("/dev/null", os.O_WRONLY | os.O_TRUNC),
      tried("/proc/self/comm", os.O_WRONLY), tried("/etc/passwd", os.O_WRONLY) in ("EACCES", "EROFS"))
os.rename("/work/x", "/work/y")
os.mkdir("/work/d"); os.rename("/work/y", "/work/d/y"); os.link("/work/d/y", "/work/l")
os.truncate("/work/l", 5)
print(open("/proc/self/status").read().split("Seccomp_filters:")[1].split()[0])
"""

    async def use(box: RunnerBox) -> None:
        result = await box.exec(["python3", "-c", code])
        assert result.stdout == b"done done done done done True\n2\n", result

    in_box(use)


def test_a_shell_that_is_entered_is_closed_at_the_end() -> None:
    async def use(box: RunnerBox) -> None:
        async with box.shell() as shell:
            assert (await shell.run("echo in")).stdout == b"in\n"
        assert (await shell.run("true")).verdict == "broken"

    in_box(use)


def test_a_shell_on_a_terminal_is_typed_into() -> None:
    async def use(box: RunnerBox) -> None:
        shell = await box.shell(terminal=True)
        look = "test -t 0 && test -t 1 && test -t 2 && stty size; exit_code() { return 3; }; exit_code"
        result = await shell.run(look)
        assert (result.stdout, result.exit_code) == (b"24 80\n", 3)
        asking = asyncio.create_task(shell.run("read -p 'name? ' n; echo hello $n; cat"))
        await asyncio.sleep(0.2)
        await shell.send(b"bob\n")
        await asyncio.sleep(0.1)
        await shell.send(b"more\n\x04")
        assert (await asking).stdout == b"name? hello bob\nmore\n"
        sleeping = asyncio.create_task(shell.run("sleep 30"))
        await asyncio.sleep(0.2)
        await shell.send(b"\x03")
        assert (await asyncio.wait_for(sleeping, 2)).exit_code == 130
        assert (await shell.run("sleep 30", timeout_s=0.3)).verdict == "timeout_wall"
        await shell.run("seq 100000")
        assert (await shell.run("echo on")).stdout == b"on\n"
        await shell.run("exit 4")
        with pytest.raises(SandboxError, match="has ended"):
            await shell.send(b"x")
        pipes = await box.shell()
        with pytest.raises(SandboxError, match="has no terminal"):
            await pipes.send(b"x")

    in_box(use)


def test_files_in_and_out() -> None:
    async def use(box: RunnerBox) -> None:
        await box.write("a/b/data.bin", bytes(range(256)) * 5000)
        assert await box.read("a/b/data.bin", limit_bytes=2 << 20) == bytes(range(256)) * 5000
        await box.write("a/b/data.bin", b"short")
        assert await box.read("/work/a/b/data.bin") == b"short"
        assert await box.tree("a") == {"b": None, "b/data.bin": b"short"}
        with pytest.raises(Refused, match="No space left"):
            await box.write("big", b"x" * (9 << 20))
        with pytest.raises(Refused, match="Read-only"):
            await box.write("/usr/x", b"x")
        with pytest.raises(Refused, match="more bytes"):
            await box.tree(limit_bytes=3)
        with pytest.raises(Refused, match="more than 1 files"):
            await box.tree(limit_files=1)
        with pytest.raises(Refused, match="No such file"):
            await box.read("absent")
        odd = "odd \udcff\n name"
        await box.exec(["sh", "-c", "printf x > 'odd \\'$'\\n name' 2>/dev/null; true"])
        await box.write(odd, b"odd")
        assert (await box.tree())[odd] == b"odd"

    in_box(use)


def test_environment_folder_and_missing_program() -> None:
    async def use(box: RunnerBox) -> None:
        await box.write("sub/file", b"")
        result = await box.exec(["sh", "-c", "pwd; echo $NAME"], env={"NAME": "värde"}, cwd="sub")
        assert result.stdout == "/work/sub\nvärde\n".encode()
        result = await box.exec(["no-such-program"])
        assert (result.verdict, result.exit_code) == ("exit", 127)
        result = await box.exec(["/work"])
        assert (result.verdict, result.exit_code) == ("exit", 126)
        result = await box.exec(["true"], cwd="absent")
        assert result.verdict == "exit" and result.exit_code == 127
        result = await box.exec(["sh", "-c", "kill -SEGV $$"])
        assert (result.verdict, result.exit_code, result.signal) == ("signal", None, signal.SIGSEGV)
        with pytest.raises(SandboxError, match="NUL"):
            await box.exec(["echo", "a\0b"])

    in_box(use)


OWNER = """
import asyncio
from lehr.sandbox.base import Spec
from lehr.sandbox.bwrap import BwrapBackend

async def main():
    box = await BwrapBackend().create(Spec())
    running = asyncio.create_task(box.exec(["sh", "-c", "sleep 61; true"], timeout_s=9))
    await asyncio.sleep(0.2)
    print("ready", flush=True)
    await running

asyncio.run(main())
"""


def test_s40_boxes_of_a_killed_owner_end_and_their_groups_are_removed() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout and owner.stdout.readline() == b"ready\n"
        inside = processes_below(owner.pid)
        assert len(inside) >= 3
        owner.kill()
    end = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in inside) and time.monotonic() < end:
        time.sleep(0.01)
    assert [pid for pid in inside if Path(f"/proc/{pid}").exists()] == []
    places = find_places()
    sweep(places)
    for place in places.controllers.values():
        assert not [path for path in place.folder.glob("lehr-*") if f"-{owner.pid}-" in path.name]


def test_missing_bubblewrap_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bwrap, "PATH", "/nonexistent")
    with pytest.raises(MissingDependency, match="apt-get install bubblewrap"):
        in_box(lambda box: box.exec(["true"]))


def test_missing_python_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "system_python", lambda: None)
    with pytest.raises(MissingDependency, match="apt-get install python3"):
        in_box(lambda box: box.exec(["true"]))


def test_forbidden_bubblewrap_is_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(0o755)
    forbidden = tmp_path / "bwrap"
    forbidden.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    forbidden.chmod(0o755)
    monkeypatch.setattr(bwrap, "PATH", f"{tmp_path}:{launch.PATH}")
    monkeypatch.setattr("lehr.sandbox.host.PATH", f"{tmp_path}:{launch.PATH}")
    with pytest.raises(HostUnfit, match="No permissions to create new namespace") as caught:
        in_box(lambda box: box.exec(["true"]))
    assert "Mend it: `" in str(caught.value)


def test_own_folders_below_usr_are_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/usr/share"))
    arguments = image.arguments.__wrapped__()
    at = arguments.index("/usr/share")
    assert arguments[at - 1] == "--tmpfs"


def test_a_shell_lives_no_longer_than_its_session() -> None:
    async def run() -> None:
        pool = Pool("bwrap", warm=0)
        async with pool.lease(Spec(limits=Limits(session_s=0.6))) as box, box.shell() as shell:
            assert (await shell.run("echo a")).stdout == b"a\n"
            began = asyncio.get_running_loop().time()
            late = await shell.run("echo b; sleep 5")
            assert asyncio.get_running_loop().time() - began < 1.6
            assert (late.verdict, late.stdout) == ("timeout_wall", b"b\n")
            assert "open for 0.6 s" in late.detail
            assert (await shell.run("true")).verdict == "broken"
            async with box.shell() as another:
                assert (await another.run("echo c")).stdout == b"c\n"
        await pool.close()

    asyncio.run(run())


def test_a_box_lives_no_longer_than_its_limit_however_often_it_is_renewed() -> None:
    async def run() -> None:
        pool = Pool("bwrap", warm=0)
        box = await pool.acquire(Spec(limits=Limits(lease_s=0.5)))
        work = asyncio.create_task(box.exec(["sleep", "5"]))
        for _ in range(4):
            await asyncio.sleep(0.1)
            box.renew()
        result = await work
        assert result.verdict == "broken"
        with pytest.raises(SandboxError, match=r"a box of its limits lives 0\.5 s"):
            box.renew()
        await pool.close()

    asyncio.run(run())


def test_a_command_line_is_no_argv() -> None:
    async def run() -> None:
        pool = Pool("bwrap", warm=0)
        async with pool.lease(Spec()) as box:
            with pytest.raises(TypeError, match=r"argv is the string 'echo hi'; expected a list"):
                await box.exec("echo hi")
        await pool.close()

    asyncio.run(run())


def test_a_full_disk_is_told_though_the_program_went_on() -> None:
    async def run() -> None:
        pool = Pool("bwrap", warm=0)
        async with pool.lease(Spec(limits=Limits(disk_bytes=1 << 20))) as box:
            result = await box.exec(["sh", "-c", "head -c 5M /dev/zero > x; true"])
            assert (result.verdict, result.detail) == ("ok", "its disk is full")
            assert (await box.exec(["rm", "x"])).detail == ""
        await pool.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    "name", ["memory_bytes", "disk_bytes", "inodes", "pids", "cpu", "wall_s", "output_bytes"]
)
def test_limits_that_mean_nothing_are_refused(name: str) -> None:
    for value in (0, -1, float("nan"), float("inf"), 1 << 70):
        with pytest.raises(ConfigError, match=f"a box cannot have {name} = {value}"):
            Limits(**{name: value})


def test_the_largest_limits_can_be_had() -> None:
    async def run() -> None:
        for limited in (None, False):
            pool = Pool(BwrapBackend(limited=limited), warm=0)
            async with pool.lease(Spec(limits=Limits(**MOST))) as box:  # type: ignore[arg-type]
                assert (await box.exec(["true"])).verdict == "ok"
            await pool.close()

    asyncio.run(run())


def test_names_that_no_file_can_have_are_refused_and_the_box_lives_on() -> None:
    async def run() -> None:
        pool = Pool("bwrap", warm=0)
        async with pool.lease(Spec()) as box, box.shell() as shell:
            for call in (box.write("\ud800", b"x"), box.read("\ud800"), box.tree("\ud800"), box.read("a\0")):
                with pytest.raises(Refused, match="cannot use the path"):
                    await call
            for command in ("echo \ud800", "echo \0"):
                with pytest.raises(SandboxError, match="cannot run the command"):
                    await shell.run(command)
            assert (await box.exec(["echo", "\ud800"])).exit_code == 126
            assert (await shell.run("echo on")).stdout == b"on\n"
        await pool.close()

    asyncio.run(run())


def test_calls_that_race_the_end_of_the_box_say_that_it_is_gone() -> None:
    async def run() -> None:
        pool = Pool("bwrap", warm=4, limit=32)

        async def chaos(number: int) -> None:
            rng = random.Random(number)
            box = await pool.acquire(Spec())
            calls = [
                lambda: box.exec(["true"]), lambda: box.write("a", b"x"), lambda: box.tree(),
                lambda: box.snapshot(), lambda: _in_shell(box), lambda: box.read("a"),
            ]  # fmt: skip
            tasks = [asyncio.create_task(rng.choice(calls)()) for _ in range(6)]
            await asyncio.sleep(rng.random() * 0.03)
            rng.choice(tasks).cancel()
            await pool.release(box)
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
                    assert isinstance(outcome, SandboxError), repr(outcome)
                elif hasattr(outcome, "discard"):
                    await outcome.discard()

        for round_ in range(4):
            await asyncio.gather(*(chaos(20 * round_ + i) for i in range(20)))
        await pool.close()

    asyncio.run(run())


async def _in_shell(box: LeasedBox) -> object:
    async with box.shell() as shell:
        return await shell.run("echo a")


def test_a_box_that_does_not_obey_a_cancelled_caller_is_given_up() -> None:
    async def use(box: RunnerBox) -> None:
        work = asyncio.create_task(box.exec(["sleep", "60"]))
        await asyncio.sleep(0.1)
        signal.pidfd_send_signal(box._process._handle._pidfd, signal.SIGSTOP)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work
        assert box.broken
        assert (await box.exec(["true"])).verdict == "broken"

    in_box(use)


@pytest.mark.skipif(os.geteuid() != 0, reason="other user: needs root")
def test_a_start_that_is_cancelled_leaves_no_process_of_bubblewrap(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def cancelled(pid: int, _: object) -> None:
        begun.append(pid)
        time.sleep(0.05)  # until it waits for its user numbers
        raise asyncio.CancelledError

    monkeypatch.setattr(zygote, "_map", cancelled)

    async def run() -> None:
        backend = BwrapBackend()
        with pytest.raises(asyncio.CancelledError):
            await backend.create(Spec())
        await backend.close()

    asyncio.run(run())
    until = time.monotonic() + 2
    while _lives(begun[0]):
        assert time.monotonic() < until
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_caller_who_passes_the_wrong_type_is_told_and_the_box_lives_on() -> None:
    async def use(box: RunnerBox) -> None:
        for path, data in (("a", "text"), ("a", None), (Path("a"), b"x")):
            with pytest.raises(TypeError, match="expected"):
                await box.write(path, data)  # pyright: ignore[reportArgumentType]
        with pytest.raises(Refused, match="''"):
            await box.write("", b"x")
        for seconds in (0, -1, float("nan")):
            with pytest.raises(ConfigError, match="timeout_s"):
                await box.exec(["true"], timeout_s=seconds)
        await box.write("a", bytearray(b"still here"))
        assert (await box.exec(["cat", "a"])).stdout == b"still here"

    in_box(use)


@pytest.mark.parametrize("wrong", [{"pids": 1.5}, {"memory_bytes": "64M"}, {"wall_s": None}, {"cpu": True}])
def test_limits_of_the_wrong_type_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Limits(**wrong)


CROWDED = """
import os, sys, threading, time
def compute():
    end = time.monotonic() + 0.25
    while time.monotonic() < end: pass
    return os.sched_getaffinity(0)
free = os.sched_getaffinity(0)
over = threading.Event()
crew = [threading.Thread(target=over.wait) for _ in range(int(sys.argv[1]))]
for one in crew: one.start()
kept = compute()
os.sched_setaffinity(0, free)
print(len(free), len(kept), len(compute()))
over.set()
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a second core: other host")
@pytest.mark.parametrize("threads", [2, 20])
def test_a_crowd_that_computes_leaves_one_core_to_others_and_is_put_back_each_time(threads: int) -> None:
    cores = len(os.sched_getaffinity(0))

    async def use(box: RunnerBox) -> None:
        result = await box.exec(["python3", "-c", CROWDED, str(threads)])
        few = cores - 1 if threads > 8 else cores
        assert result.stdout.split() == [b"%d" % n for n in (cores, few, few)], result
        again = await box.exec(["python3", "-c", "import os; print(len(os.sched_getaffinity(0)))"])
        assert int(again.stdout) == cores, "the next program has all cores again"

    in_box(use)
