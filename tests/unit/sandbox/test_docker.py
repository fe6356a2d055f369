"""The docker backend against an engine that speaks the real protocol and runs the real process 1."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import process_one
import pytest
from fake_docker import FakeEngine

from lehr.app.cli import run
from lehr.app.commands import sandbox
from lehr.core.errors import HostUnfit, MissingDependency
from lehr.sandbox import seccomp
from lehr.sandbox.base import BACKENDS, Box, Limits, Spec
from lehr.sandbox.box import FileSnapshot
from lehr.sandbox.conformance import CASES
from lehr.sandbox.container.driver import KERNEL_BYTES, OWN_BYTES, OWN_PIDS
from lehr.sandbox.docker import driver as docker_driver
from lehr.sandbox.docker import payload, profile
from lehr.sandbox.docker.attached import Attached
from lehr.sandbox.docker.backend import IMAGE, DockerBackend
from lehr.sandbox.errors import Refused, SandboxError
from lehr.sandbox.inside import contained
from lehr.sandbox.owner import owner
from lehr.sandbox.pool import Pool

pytest.importorskip("docker", reason="the extra lehr[docker] is not installed")

LIMITS = Limits(memory_bytes=128 << 20, disk_bytes=8 << 20, inodes=512, pids=24, cpu=0.5, wall_s=10.0)
SMALL = Spec(limits=LIMITS)
Use = Callable[[DockerBackend], Awaitable[Any]]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    process_one.require()
    fake = FakeEngine(tmp_path)
    fake.start()
    yield fake
    fake.stop()


def with_backend(engine: FakeEngine, use: Use, **options: Any) -> Any:
    async def run() -> Any:
        backend = DockerBackend(address=engine.address, **options)
        try:
            return await use(backend)
        finally:
            await backend.close()

    return asyncio.run(run())


# --- what is asked for


def body(spec: Spec = SMALL, runtime: str | None = None) -> dict[str, Any]:
    return payload.container(spec, "an-image", ["python3"], {"a": "b"}, "seccomp={}", runtime)


def test_a_container_is_as_little_as_a_program_can_live_in() -> None:
    asked = body()
    held = asked["HostConfig"]
    assert held["NetworkMode"] == "none" and asked["NetworkDisabled"] is True
    assert held["CapDrop"] == ["ALL"] and "CapAdd" not in held and held["Privileged"] is False
    assert held["SecurityOpt"] == ["no-new-privileges:true", "seccomp={}"]
    assert held["ReadonlyRootfs"] is True
    assert set(held["Tmpfs"]) == {"/work", "/tmp"} and held["ShmSize"] == LIMITS.disk_bytes
    for options in held["Tmpfs"].values():
        wanted = {"nosuid", "nodev", f"size={LIMITS.disk_bytes}", "nr_inodes=512", "uid=1000", "gid=1000"}
        assert wanted <= set(options.split(","))
    assert held["Memory"] == held["MemorySwap"] == LIMITS.memory_bytes + LIMITS.disk_bytes + OWN_BYTES
    assert held["PidsLimit"] == LIMITS.pids + OWN_PIDS
    assert held["NanoCpus"] == 500_000_000
    assert held["Init"] is False and held["IpcMode"] == held["CgroupnsMode"] == "private"
    assert held["LogConfig"]["Type"] == "none", "what programs say is not kept on the engine's disk"
    assert asked["User"] == "1000:1000"
    assert asked["OpenStdin"] and asked["StdinOnce"], "a box ends with its owner's connection"
    assert asked["Healthcheck"] == {"Test": ["NONE"]}
    for way_out in ("Binds", "Mounts", "Devices", "PidMode", "UsernsMode", "VolumesFrom", "Runtime"):
        assert way_out not in held


def test_a_kernel_of_its_own_gets_room_around_the_box() -> None:
    plain, own = body()["HostConfig"], body(runtime="runsc")["HostConfig"]
    assert own["Runtime"] == "runsc"
    assert own["Memory"] == plain["Memory"] + KERNEL_BYTES
    assert own["PidsLimit"] > plain["PidsLimit"]


def test_the_filter_is_ours_in_the_engines_words() -> None:
    found = profile.profile("x86_64")
    assert found["defaultAction"] == "SCMP_ACT_ERRNO" and found["defaultErrnoRet"] == 38
    assert found["architectures"] == ["SCMP_ARCH_X86_64"], "another convention ends the program"
    allowed = [rule for rule in found["syscalls"] if rule["action"] == "SCMP_ACT_ALLOW"]
    plain = {name for rule in allowed if not rule.get("args") for name in rule["names"]}
    refused = {
        name for rule in found["syscalls"] if rule["action"] == "SCMP_ACT_ERRNO" for name in rule["names"]
    }
    assert set(seccomp.DENIED.split()) <= refused and not plain & refused
    assert plain | set(profile.CONDITIONAL) == set(seccomp.ALLOWED.split())
    assert not plain & set(profile.CONDITIONAL)
    for rule in found["syscalls"]:
        indices = [arg["index"] for arg in rule.get("args", ())]
        assert len(indices) == len(set(indices)), "several conditions on one argument are alternatives"
    (clone,) = [rule for rule in found["syscalls"] if rule["names"] == ["clone"]]
    assert clone["args"][0]["value"] == sum(seccomp.NAMESPACE_FLAGS) and clone["args"][0]["valueTwo"] == 0


def test_the_engines_filter_holds_before_ours_does() -> None:
    process_one.require()
    code = """
import ctypes, errno, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *args):
    ctypes.set_errno(0)
    libc.syscall(*args)
    print(name, errno.errorcode.get(ctypes.get_errno(), "OK"))
call("mount", 165, 0, 0, 0, 0, 0)
call("unshare", 272, 0x10000000)
call("ptrace", 101, 0, 0, 0, 0)
call("bpf", 321, 0, 0, 0)
call("clone3", 435, 0, 0)
call("statmount", 457, 0, 0, 0, 0)
call("newuser", 56, 0x10000011, 0, 0, 0, 0)
call("personality", 135, 0x0040000)
call("getpid", 39)
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_PACKET):
    try: socket.socket(family, socket.SOCK_DGRAM).close(); print(family.name, "OK")
    except OSError as error: print(family.name, errno.errorcode[error.errno])
"""
    if platform.machine() != "x86_64":
        pytest.skip("other host: the numbers are those of x86_64")
    disks = {"/work": 1 << 20, "/tmp": 1 << 20}
    argv = ["/usr/bin/python3", "-I", "-S", "-c", code]
    rules = profile.profile("x86_64")
    process = process_one.start(argv, {"PATH": "/usr/bin"}, disks, user=1000, read_only=True, profile=rules)
    said, errors = process.communicate(timeout=30)
    found = dict(line.split() for line in said.decode().splitlines())
    assert found == {
        **dict.fromkeys(("mount", "unshare", "ptrace", "bpf"), "EPERM"),
        **dict.fromkeys(("clone3", "statmount", "newuser", "personality", "AF_PACKET"), "ENOSYS"),
        **dict.fromkeys(("getpid", "AF_UNIX", "AF_INET"), "OK"),
    }, errors


# --- boxes


def test_a_box_works_as_any_other(engine: FakeEngine) -> None:
    async def use(backend: DockerBackend) -> None:
        box = await backend.create(SMALL)
        assert engine.asked == ["version", "list", "image", "create", "attach", "start"]
        result = await box.exec(["sh", "-c", "cat; echo said >&2; exit 3"], stdin=b"fed")
        assert (result.verdict, result.exit_code) == ("exit", 3)
        assert (result.stdout, result.stderr) == (b"fed", b"said\n")
        big = os.urandom(3 << 20)
        result = await box.exec(["sh", "-c", "wc -c; head -c 300000 /dev/zero"], stdin=big)
        assert result.stdout == b"%d\n" % len(big) + bytes(300_000)
        await box.write("a/b", big[: 1 << 20])
        assert await box.read("a/b") == big[: 1 << 20]
        assert await box.tree() == {"a": None, "a/b": big[: 1 << 20]}
        await box.exec(["ln", "-s", "/etc/passwd", "link"])
        with pytest.raises(Refused):
            await box.read("link")
        async with box.shell() as shell:
            assert (await shell.run("cd /tmp; x=5; (exit 7)")).exit_code == 7
            assert (await shell.run("echo $x; pwd")).stdout == b"5\n/tmp\n"
        with pytest.raises(SandboxError, match="terminal"):
            await box.shell(terminal=True)
        await box.destroy()
        await box.destroy()
        assert engine.containers == {} and engine.asked.count("remove") == 1
        assert (await box.exec(["true"])).verdict == "broken"

    with_backend(engine, use)


@pytest.mark.parametrize(
    ("argv", "verdict"),
    [
        (["true"], "ok"),
        (["no-such-program"], "exit"),
        (["sh", "-c", "kill -9 $$"], "signal"),
        (["sleep", "60"], "timeout_wall"),
        (["sh", "-c", "while :; do :; done"], "timeout_cpu"),
        (["python3", "-c", "a=[]\nwhile 1: a.append(bytearray(1<<20))"], "oom"),
        (["python3", "-c", "import os, time\nwhile 1:\n if not os.fork(): time.sleep(9)"], "pids"),
        (["head", "-c", "9000000", "/dev/zero"], "ok"),
        (["sh", "-c", "head -c 20000000 /dev/zero > /tmp/full"], "disk"),
        (["sh", "-c", "while :; do head -c 1000000 /dev/zero; done"], "output"),
    ],
)  # fmt: skip
def test_what_ended_a_program_is_named(engine: FakeEngine, argv: list[str], verdict: str) -> None:
    room = 1 << 20 if argv[0] == "head" else 1 << 16
    cpu_s = 0.5 if verdict == "timeout_cpu" else 5.0
    wall_s = 1.5 if verdict == "timeout_wall" else 10.0
    limits = dataclasses.replace(LIMITS, wall_s=wall_s, cpu_s=cpu_s, output_bytes=room)

    async def use(backend: DockerBackend) -> None:
        box = await backend.create(Spec(limits=limits))
        result = await box.exec(argv)
        assert result.verdict == verdict, result
        assert (await box.exec(["echo", "on"])).stdout == b"on\n"

    with_backend(engine, use)


PROMISES = ("S2", "S13", "S14", "S17", "S17-convention", "S19", "S22", "S23", "S25", "S27", "S28", "S31")


@pytest.mark.parametrize("case", PROMISES)
def test_promises_hold_by_what_is_inside(engine: FakeEngine, case: str) -> None:
    async def use(backend: DockerBackend) -> None:
        pool = Pool(backend, warm=0)
        await CASES[case](pool)
        await pool.close()

    with_backend(engine, use)


def test_what_the_engine_was_asked_for_is_looked_at_from_within(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = process_one.start

    def careless(*args: Any, **options: Any) -> Any:
        return real(*args, **{**options, "read_only": False, "user": 0})

    monkeypatch.setattr(process_one, "start", careless)

    async def use(backend: DockerBackend) -> None:
        with pytest.raises(HostUnfit, match=r"is no box: it does not have user 1000 alone, .*a read-only root"):
            await backend.create(SMALL)

    with_backend(engine, use)
    assert engine.containers == {}


def test_labels_carry_the_owner(engine: FakeEngine) -> None:
    async def use(backend: DockerBackend) -> None:
        await backend.create(SMALL)
        (asked,) = engine.created
        assert asked["Labels"] == {payload.OWNER: owner(), payload.HOST: docker_driver.boot_id()}
        assert asked["Image"] == IMAGE
        assert json.loads(asked["HostConfig"]["SecurityOpt"][1].removeprefix("seccomp="))["syscalls"]

    with_backend(engine, use)


def test_images_by_name_and_by_setting(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.images |= {"ours:1": {}, "theirs:2": {}, "holding:3": {"Volumes": {"/data": {}}}}
    monkeypatch.setenv("LEHR_DOCKER_IMAGE", "ours:1")

    async def use(backend: DockerBackend) -> None:
        await backend.create(SMALL)
        await backend.create(Spec("theirs:2", LIMITS))
        assert [asked["Image"] for asked in engine.created] == ["ours:1", "theirs:2"]
        with pytest.raises(HostUnfit, match="declares the volumes /data"):
            await backend.create(Spec("holding:3", LIMITS))
        with pytest.raises(HostUnfit, match=r"no image 'oci:/a/b.tar'.*docker load"):
            await backend.create(Spec("oci:/a/b.tar", LIMITS))

    with_backend(engine, use)


# --- what goes wrong


def test_no_package_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    with pytest.raises(MissingDependency, match=r"pip install 'lehr\[docker\]'"):
        asyncio.run(DockerBackend().create(SMALL))


def test_no_engine_is_one_message(tmp_path: Path) -> None:
    for address in (f"unix://{tmp_path}/nothing.sock", "tcp://127.0.0.1:9"):
        with pytest.raises(HostUnfit, match=rf"Docker Engine at {address} does not answer.*Start it") as error:
            asyncio.run(DockerBackend(address=address).create(SMALL))
        assert len(str(error.value)) < 700


@pytest.mark.parametrize("command", [["check"], ["run", "--", "true"]])
def test_the_command_line_says_it_once(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nothing.sock")
    name, *rest = command
    assert run(["sandbox", name, "--backend", "docker", *rest]) == 2
    said = capsys.readouterr()
    assert said.err.count("does not answer") == 1 and "DOCKER_HOST" in said.err and not said.out


def test_names_of_images_are_not_taken_for_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "root").mkdir(parents=True)
    for name in ("host", "python:3.12-slim", "registry.example:5000/a/python:3", "example/python", "/a/folder"):
        assert sandbox._place(name) == name
    for name, place in (("./a/root", "a/root"), ("a/root", "a/root"), ("..", "..")):
        assert sandbox._place(name) == str((tmp_path / place).resolve())
    assert sandbox._place("oci:a/b.tar") == f"oci:{tmp_path}/a/b.tar"


def test_no_image_says_how_to_fetch_it(engine: FakeEngine) -> None:
    async def use(backend: DockerBackend) -> None:
        with pytest.raises(HostUnfit, match=r"No such image: absent:1 \(status 404\).*`docker pull absent:1`"):
            await backend.create(Spec("absent:1", LIMITS))

    with_backend(engine, use)


@pytest.mark.parametrize(
    ("endpoint", "status", "said"),
    [("create", 409, "name is in use"), ("start", 500, "no such runtime"), ("attach", 400, "cannot hijack")],
)
def test_a_refusal_is_passed_on_and_nothing_is_left(
    engine: FakeEngine, endpoint: str, status: int, said: str
) -> None:
    engine.failures[endpoint] = (status, said)

    async def use(backend: DockerBackend) -> None:
        with pytest.raises(SandboxError, match=rf"{said} \(status {status}\)"):
            await backend.create(SMALL)
        engine.failures.clear()
        assert (await (await backend.create(SMALL)).exec(["true"])).verdict == "ok"

    with_backend(engine, use)
    assert engine.containers == {}


def test_an_engine_that_hangs_is_waited_for_only_so_long(engine: FakeEngine) -> None:
    async def use(backend: DockerBackend) -> None:
        await backend.create(SMALL)
        engine.before["create"] = lambda: time.sleep(1.0)
        with pytest.raises(SandboxError, match=r"did not make a container of .* within 0\.3 s"):
            await backend.create(SMALL)
        await asyncio.sleep(1.0)

    with_backend(engine, use, call_s=0.3)


def test_a_process_1_that_ends_tells_why(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    real = process_one.start
    monkeypatch.setattr(
        process_one,
        "start",
        lambda argv, *args, **options: real(["sh", "-c", "echo no python >&2"], *args, **options),
    )

    async def use(backend: DockerBackend) -> None:
        with pytest.raises(HostUnfit, match="no box came up in it: no python"):
            await backend.create(SMALL)

    with_backend(engine, use)
    assert engine.containers == {}


def test_a_stream_that_is_cut_breaks_the_box(engine: FakeEngine) -> None:
    async def use(backend: DockerBackend) -> None:
        box = await backend.create(SMALL)
        running = asyncio.create_task(box.exec(["sh", "-c", "echo begun; sleep 60"]))
        await asyncio.sleep(0.3)
        (container,) = engine.containers.values()
        container.cut()
        result = await asyncio.wait_for(running, 5)
        assert result.verdict == "broken" and result.stdout == b"begun\n", result
        assert box.broken
        with pytest.raises(SandboxError):
            await box.read("a")

    with_backend(engine, use)
    assert engine.containers == {}


def test_an_engine_that_ended_the_box_for_memory_is_believed(engine: FakeEngine) -> None:
    async def use(backend: DockerBackend) -> None:
        box = await backend.create(SMALL)
        running = asyncio.create_task(box.exec(["sleep", "60"]))
        await asyncio.sleep(0.2)
        (container,) = engine.containers.values()
        container.oom_killed = True
        container.cut()
        result = await asyncio.wait_for(running, 5)
        assert result.verdict == "oom" and "128 MiB" in result.detail

    with_backend(engine, use)


def test_a_lost_removal_is_tried_again(engine: FakeEngine) -> None:
    async def use(backend: DockerBackend) -> None:
        box = await backend.create(SMALL)
        engine.failures["remove"] = (500, "busy")
        ending = asyncio.create_task(box.destroy())
        while "remove" not in engine.asked:
            await asyncio.sleep(0.01)
        engine.failures["remove"] = (409, "removal of container is already in progress")
        await asyncio.wait_for(ending, 5)
        assert engine.asked.count("remove") == 2

    with_backend(engine, use)


def test_states_are_not_recorded_and_the_message_says_what_does(engine: FakeEngine) -> None:
    async def use(backend: DockerBackend) -> None:
        box = await backend.create(SMALL)
        with pytest.raises(SandboxError, match="bwrap, which records the disk"):
            await box.snapshot()
        other: Any = FileSnapshot(SMALL, None)  # type: ignore[arg-type]
        for refused in (box.restore(other), backend.create(SMALL, other)):
            with pytest.raises(SandboxError, match="cannot be recorded"):
                await refused
        assert (await box.exec(["true"])).verdict == "ok"

    with_backend(engine, use)


# --- nothing is left behind


@pytest.mark.parametrize("endpoint", ["version", "image", "create", "attach", "start"])
def test_a_cancelled_caller_leaves_nothing(engine: FakeEngine, endpoint: str) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        go_on.wait(5)

    engine.before[endpoint] = wait

    async def use(backend: DockerBackend) -> None:
        making = asyncio.create_task(backend.create(SMALL))
        await asyncio.to_thread(reached.wait, 5)
        making.cancel()
        started = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert time.monotonic() - started < 1, "who gave up does not wait for the engine"
        go_on.set()

    with_backend(engine, use)
    assert engine.containers == {}


def test_a_box_for_which_no_descriptor_is_left_leaves_nothing(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    async def use(backend: DockerBackend) -> None:
        monkeypatch.setattr("lehr.sandbox.container.carrier.socket.socketpair", none_left)
        with pytest.raises(OSError, match="Too many open files"):
            await backend.create(SMALL)
        monkeypatch.undo()

    with_backend(engine, use)
    assert engine.containers == {}


def test_a_cancelled_first_caller_connects_for_the_next(engine: FakeEngine) -> None:
    reached, go_on = threading.Event(), threading.Event()
    engine.before["list"] = lambda: (reached.set(), go_on.wait(5))  # type: ignore[func-returns-value]

    async def use(backend: DockerBackend) -> None:
        making = asyncio.create_task(backend.create(SMALL))
        await asyncio.to_thread(reached.wait, 5)
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        next_one = asyncio.create_task(backend.create(SMALL))
        await asyncio.sleep(0.05)
        go_on.set()
        assert (await (await next_one).exec(["true"])).verdict == "ok"
        assert engine.asked.count("version") == engine.asked.count("list") == 1
        await backend.close()
        await backend.close()
        with pytest.raises(SandboxError, match="closed"):
            await backend.create(SMALL)

    with_backend(engine, use)
    assert engine.containers == {}


async def sleepers(box: Box) -> bytes:
    return (await box.exec(["sh", "-c", "grep -l '(sleep)' /proc/[0-9]*/stat 2>/dev/null"])).stdout


def test_a_cancelled_exec_ends_its_program(engine: FakeEngine) -> None:
    async def use(backend: DockerBackend) -> None:
        box = await backend.create(SMALL)
        running = asyncio.create_task(box.exec(["sh", "-c", "sleep 60 & sleep 60"]))
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        end = time.monotonic() + 5
        while (left := await sleepers(box)) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        assert not left

    with_backend(engine, use)


def carriers() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("lehr-") and name.endswith(("-in", "-out"))]


def test_threads_and_descriptors_end_with_their_boxes(engine: FakeEngine) -> None:
    async def use(backend: DockerBackend) -> None:
        async def churn() -> None:
            await (await backend.create(SMALL)).destroy()

        await churn()
        threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
        await asyncio.gather(*(churn() for _ in range(6)))
        end = time.monotonic() + 5
        while carriers() and time.monotonic() < end:
            await asyncio.sleep(0.02)
        assert not carriers()
        assert threading.active_count() <= threads + 3 * 16
        assert len(os.listdir("/proc/self/fd")) <= descriptors + 40

    with_backend(engine, use)


def test_boxes_of_an_owner_that_ended_are_removed_at_the_next_start(engine: FakeEngine) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        ended.wait()
    space = owner().split("-")[1]
    here, gone = docker_driver.boot_id(), f"lehr-{space}-{ended.pid}-1"
    kept = {"HostConfig": {}}
    engine.add("orphan", {**kept, "Labels": {payload.OWNER: gone, payload.HOST: here}}, "running")
    engine.add("elsewhere", {**kept, "Labels": {payload.OWNER: gone, payload.HOST: "other"}}, "running")
    engine.add("ended-elsewhere", {**kept, "Labels": {payload.OWNER: gone, payload.HOST: "other"}}, "exited")
    engine.add("ours", {**kept, "Labels": {payload.OWNER: owner(), payload.HOST: here}}, "running")
    engine.add("odd", {**kept, "Labels": {payload.OWNER: f"lehr-{space}-x", payload.HOST: here}}, "running")
    engine.add("somebody's", {**kept, "Labels": {}}, "exited")

    async def use(backend: DockerBackend) -> None:
        await (await backend.create(SMALL)).destroy()

    with_backend(engine, use)
    assert {c.name for c in engine.containers.values()} == {"elsewhere", "ours", "odd", "somebody's"}


def test_boxes_end_with_their_owner(engine: FakeEngine) -> None:
    code = (
        "import asyncio, sys\nfrom lehr.sandbox.base import Spec\n"
        "from lehr.sandbox.docker.backend import DockerBackend\n"
        "async def main():\n box = await DockerBackend(address=sys.argv[1]).create(Spec())\n"
        " print('made', flush=True)\n await box.exec(['sleep', '60'])\nasyncio.run(main())"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen(
        [sys.executable, "-c", code, engine.address], stdout=subprocess.PIPE, env=environment
    ) as owner:
        assert owner.stdout and owner.stdout.readline() == b"made\n"
        owner.kill()
    (container,) = engine.containers.values()
    assert container.ended.wait(5) and container.state == "exited"

    async def use(backend: DockerBackend) -> None:
        await backend.create(SMALL)
        assert container.id not in engine.containers

    with_backend(engine, use)


# --- parts


class Pieces:
    """A socket that gives what it has in pieces of a size."""

    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.size = data, size
        self.stalls = 0

    def settimeout(self, _: float) -> None: ...

    def recv(self, count: int) -> bytes:
        self.stalls += 1
        if self.stalls % 3 == 0:
            raise TimeoutError
        part = self.data[: min(count, self.size)]
        self.data = self.data[len(part) :]
        return part


@pytest.mark.parametrize("size", [1, 3, 8, 100])
def test_multiplexed_pieces_are_told_apart(size: int) -> None:
    def piece(kind: int, data: bytes) -> bytes:
        return bytes((kind, 0, 0, 0)) + len(data).to_bytes(4, "big") + data

    end = Pieces(piece(1, b"one") + piece(2, b"oops") + piece(1, b"") + piece(1, b"two") + b"\1\0", size)
    stream = Attached(end)
    parts: list[bytes] = []
    while data := stream.receive():
        parts.append(data)
    assert b"".join(parts) == b"onetwo"
    assert stream.said == "oops"


def test_the_groups_counts_are_read_from_within(tmp_path: Path) -> None:
    new, old = tmp_path / "memory.events", tmp_path / "memory.oom_control"
    absent = str(tmp_path / "absent")
    old.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    assert contained.counted("oom_kill", (str(new), str(old))) == 3
    new.write_text("low 0\nhigh 0\nmax 9\noom 2\noom_kill 1\noom_group_kill 0\n")
    assert contained.counted("oom_kill", (str(new), str(old))) == 1
    assert contained.counted("oom_kill", (absent,)) == contained.counted("none", (str(new),)) == 0


def test_clients_are_loaded_with_the_first_box() -> None:
    code = (
        "import sys, lehr.sandbox.docker.backend as d, lehr.sandbox.kubernetes.backend as k\n"
        "d.DockerBackend(), k.KubernetesBackend()\n"
        "print({'docker', 'kubernetes', 'requests', 'urllib3', 'websocket'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment) == b"set()\n"


def test_registered() -> None:
    assert BACKENDS.get("docker") is DockerBackend
