"""The gvisor backend: its bundle and frames as data, and where runsc is installed what only a host can see."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from lehr.core.errors import HostUnfit, MissingDependency
from lehr.sandbox import collect, frames, image
from lehr.sandbox.base import BACKENDS, Limits, Spec
from lehr.sandbox.channel import ChannelLost
from lehr.sandbox.errors import Refused, SandboxError
from lehr.sandbox.frames import StreamChannel
from lehr.sandbox.gvisor import bundle, runsc
from lehr.sandbox.gvisor.backend import GvisorBackend
from lehr.sandbox.gvisor.box import GvisorBox, MemorySnapshot
from lehr.sandbox.places import find_places, sweep

SMALL = Spec(limits=Limits(memory_bytes=128 << 20, disk_bytes=8 << 20, pids=24, wall_s=10.0))
Use = Callable[[GvisorBox, GvisorBackend], Awaitable[Any]]

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="runsc restores nothing for other users")


def in_box(use: Use, spec: Spec = SMALL, *, limited: bool | None = None) -> Any:
    try:
        runsc.find()
    except MissingDependency as error:
        pytest.skip(str(error))

    async def run() -> Any:
        backend = GvisorBackend(limited=limited)
        try:
            return await use(await backend.create(spec), backend)
        finally:
            await backend.close()

    return asyncio.run(run())


# --- the bundle


def test_bundle_shows_the_allow_list_read_only() -> None:
    mounts = {mount["destination"]: mount for mount in bundle.mounts()}
    binds = {path: mount for path, mount in mounts.items() if mount["type"] == "bind"}
    assert "/usr" in binds
    assert all({"ro", "nosuid", "nodev"} <= set(mount["options"]) for mount in binds.values())
    assert set(binds) <= {"/usr", *(f"/{name}" for name in image.ROOT_LINKS)}
    assert "sysfs" not in {mount["type"] for mount in mounts.values()}
    assert mounts["/sys"]["type"] == "tmpfs" and "ro" in mounts["/sys"]["options"]
    for folder in image.covered():
        assert mounts[str(folder)]["type"] == "tmpfs"


def test_bundle_gives_programs_nothing() -> None:
    config = bundle.config(["/usr/bin/python3"])
    process = config["process"]
    assert process["noNewPrivileges"] is True
    assert dict(entry.split("=", 1) for entry in process["env"]) == image.ENVIRONMENT
    assert config["hostname"] == "box"
    assert config["root"] == {"path": "rootfs", "readonly": True}
    assert {space["type"] for space in config["linux"]["namespaces"]} >= {
        "pid",
        "network",
        "mount",
        "ipc",
        "uts",
    }
    assert "CAP_NET_RAW" not in process["capabilities"]["bounding"]


def test_bundle_on_disk(tmp_path: Path) -> None:
    bundle.write(tmp_path, ["/bin/true"])
    root = tmp_path / "rootfs"
    assert json.loads((tmp_path / "config.json").read_text())["process"]["args"] == ["/bin/true"]
    assert (root / "etc/passwd").read_bytes() == image.PASSWD
    assert not (root / "etc/shadow").exists()
    for name in image.ROOT_LINKS:
        if Path("/", name).is_symlink():
            assert os.readlink(root / name) == os.readlink(Path("/", name))
    assert os.readlink(root / "var/tmp") == "../tmp"
    assert root.stat().st_mode & 0o777 == 0o755


def test_platform_by_what_the_binary_offers() -> None:
    old = 'x\n  -overlay2 value\n  -platform string\n    \tptrace (default), kvm. (default "ptrace")\n  -z'
    new = "x\n  -platform string\n    \tsystrap (default), ptrace, kvm.\n  -platform_device_path string\n"
    assert runsc.platform(old) == "ptrace"
    assert runsc.platform(new) == "systrap"
    assert runsc.platform("x\n  -platform string\n    \tptrace, kvm.\n  -systrap-thing\n") == "ptrace"


def test_missing_runsc_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(runsc, "PATH", "/nonexistent")
    with pytest.raises(MissingDependency, match="apt-get install runsc"):
        asyncio.run(GvisorBackend().create(SMALL))


def test_another_program_is_not_taken_for_runsc() -> None:
    with pytest.raises(HostUnfit, match="is no runsc"):
        asyncio.run(GvisorBackend(program="/bin/echo").create(SMALL))


def test_registered() -> None:
    assert BACKENDS.get("gvisor") is GvisorBackend


# --- frames and results


def test_headers_that_no_runner_sends_are_refused() -> None:
    assert frames.checked({"id": 1, "status": -9}) == {"id": 1, "status": -9}
    for header in ([], {}, {"id": "1"}, {"id": 1, "status": "0"}, {"id": 1, "odd": 1}, {"id": 1, "fds": 3}):
        with pytest.raises(ValueError):
            frames.checked(header)


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("!II", 1 << 30, 0),
        struct.pack("!II", 2, 1 << 30),
        struct.pack("!II", 2, 0) + b"[]",
        struct.pack("!II", 5, 0) + b"\xff\xff\xff\xff\xff",
        struct.pack("!II", 10, 0) + b'{"id":"x"}',
    ],
)
def test_a_frame_beyond_reason_ends_the_box(frame: bytes) -> None:
    async def run() -> None:
        out, theirs = os.pipe()
        inward, ours = os.pipe()
        channel = StreamChannel(asyncio.get_running_loop(), (out, ours))
        _, answer = channel.expect()
        os.write(theirs, frame)
        with pytest.raises(ChannelLost):
            await asyncio.wait_for(answer, 2)
        os.close(theirs)
        os.close(inward)

    asyncio.run(run())


def test_results_without_a_descriptor_are_judged_the_same() -> None:
    assert collect.judge(b"x", "f", 4, regular=True, names=1, size=1) == b"x"
    for odd in ({"regular": False}, {"names": 2}, {"size": 5}):
        with pytest.raises(Refused):
            collect.judge(b"x", "f", 4, **{"regular": True, "names": 1, "size": 1, **odd})
    with pytest.raises(Refused, match="grew"):
        collect.judge(b"12345", "f", 4, regular=True, names=1, size=1)
    assert collect.cut(b"ab", [["d", -1], ["d/f", 2]], 9) == {"d": None, "d/f": b"ab"}
    for entries in ([["f", 3]], [["f"]], [[1, 1]], ["f"], [["a", 0], ["b", 0], ["c", 0]]):
        with pytest.raises(Refused):
            collect.cut(b"ab", entries, 1)


# --- boxes


def left_behind() -> list[str]:
    base = Path(f"/var/tmp/lehr-runsc-{os.geteuid()}")
    found = [str(path) for path in base.glob(f"*-{os.getpid()}-*")] if base.exists() else []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if f"-{os.getpid()}-".encode() in (line := path.read_bytes()) and b"runsc" in line:
                found.append(line.decode())
        except OSError:
            continue
    for place in find_places().controllers.values():
        found += [str(path) for path in place.folder.glob("lehr-*") if f"-{os.getpid()}-" in path.name]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if "lehr-runsc" in line]
    return found


def test_programs_hold_no_right_and_see_no_runner() -> None:
    code = """
import os
print(os.getresuid(), os.getgroups(), os.uname().nodename)
print([line.split()[1] for line in open('/proc/self/status') if line.startswith('Cap')])
for path in ('/proc/1/fd/0', '/proc/1/fd/1', '/proc/1/mem', '/proc/1/root/etc'):
    try: os.open(path, os.O_RDONLY); print('opened', path)
    except OSError: pass
try: os.kill(1, 9); print('killed')
except OSError: pass
print(os.listdir('/sys'), sorted(set(os.listdir('/dev')) & {'fuse', 'net', 'kvm', 'mem'}))
"""

    async def use(box: GvisorBox, _: GvisorBackend) -> None:
        result = await box.exec(["python3", "-I", "-c", code])
        lines = result.stdout.decode().splitlines()
        assert lines[0] == "(1000, 1000, 1000) [] box"
        assert set(eval(lines[1])) == {"0" * 16}
        assert lines[2:] == ["[] []"], result

    in_box(use)


@needs_root
def test_recorded_memory_goes_on_here_and_elsewhere() -> None:
    draw = "import os, uuid; print(os.urandom(8).hex(), uuid.uuid4())"

    async def use(box: GvisorBox, backend: GvisorBackend) -> None:
        await box.write("kept", b"kept")
        shell = await box.shell()
        await shell.run("x=5; (while :; do echo beat >> /tmp/beat; sleep 0.05; done) &")
        snapshot = await box.snapshot()
        assert snapshot.kind == "memory" and snapshot.spec == SMALL
        assert (await shell.run("echo $x")).stdout == b"5\n"
        await box.write("kept", b"lost")
        first, second = await backend.create(SMALL, snapshot), await backend.create(SMALL, snapshot)
        assert len({box.id, first.id, second.id}) == 3
        drawn = {(await each.exec(["python3", "-I", "-c", draw])).stdout for each in (first, second)}
        assert len(drawn) == 2
        beats = await first.exec(["sh", "-c", "wc -l < /tmp/beat; sleep 0.5; wc -l < /tmp/beat"])
        count, later = map(int, beats.stdout.split())
        assert 0 < count < later, "what ran goes on in a copy"
        await box.restore(snapshot)
        assert await box.read("kept") == b"kept"
        assert (await shell.run("true")).verdict == "broken"
        again = await box.shell()
        assert (await again.run("echo new")).stdout == b"new\n"
        again_recorded = await first.snapshot()
        await snapshot.discard()
        await snapshot.discard()
        assert await second.read("kept") == b"kept", "restored boxes outlive what they were restored from"
        with pytest.raises(SandboxError, match="discarded"):
            await backend.create(SMALL, snapshot)
        third = await backend.create(SMALL, again_recorded)
        assert await third.read("kept") == b"kept"
        with pytest.raises(SandboxError, match="another spec"):
            await backend.create(Spec(), again_recorded)

    in_box(use)
    assert left_behind() == []


@needs_root
def test_a_failed_recording_breaks_the_box_and_says_so() -> None:
    async def use(box: GvisorBox, _: GvisorBackend) -> None:
        sandbox: Any = box._process
        sandbox.name = "no-such-container"
        with pytest.raises(SandboxError, match="runsc checkpoint"):
            await box.snapshot()
        assert (await box.exec(["true"])).verdict == "broken"

    in_box(use)
    assert left_behind() == []


@needs_root
def test_nothing_is_left_after_cancellation() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))

    async def use(box: GvisorBox, backend: GvisorBackend) -> None:
        running = asyncio.create_task(box.exec(["sleep", "60"]))
        await asyncio.sleep(0.3)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (await box.exec(["echo", "on"])).stdout == b"on\n"
        for wait_s in (0.0, 0.02, 0.08, 0.15, 0.25, 0.5, 0.8):
            other = GvisorBackend()
            making = asyncio.create_task(other.create(SMALL))
            await asyncio.sleep(wait_s)
            making.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # it was made in time
                await making
            await other.close()
        for wait_s in (0.0, 0.02, 0.08, 0.15):
            making = asyncio.create_task(backend.create(SMALL))
            await asyncio.sleep(wait_s)
            making.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await making).destroy()
        recording = asyncio.create_task(box.snapshot())
        await asyncio.sleep(0.1)
        recording.cancel()
        with pytest.raises(asyncio.CancelledError):
            await recording
        assert (await box.exec(["echo", "on"])).stdout == b"on\n"

    in_box(use)
    assert left_behind() == []
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 1


def test_s41_memory_ends_a_shell_by_name() -> None:
    bomb = "python3 -I -c 'import mmap; mmap.mmap(-1, 1 << 30, flags=mmap.MAP_SHARED | 0x20 | 0x8000)'"

    async def use(box: GvisorBox, _: GvisorBackend) -> None:
        if not find_places().usable:
            pytest.skip("other host: control groups cannot be written")
        shell = await box.shell()
        result = await shell.run(bomb)
        assert result.verdict == "oom" and result.exit_code is None, result
        assert (await box.exec(["true"])).verdict == "broken"

    in_box(use)
    assert left_behind() == []


def test_without_a_control_group() -> None:
    async def use(box: GvisorBox, _: GvisorBackend) -> None:
        heap = "a = []\nwhile True: a.append(b'x' * (1 << 20))"
        assert (await box.exec(["python3", "-I", "-c", heap])).verdict == "oom"
        assert (await box.exec(["echo", "on"])).stdout == b"on\n"
        await box.destroy()

    in_box(use, limited=False)
    assert left_behind() == []


OWNER = """
import asyncio
from lehr.sandbox.base import Spec
from lehr.sandbox.gvisor.backend import GvisorBackend

async def main():
    backend = GvisorBackend()
    box = await backend.create(Spec())
    running = asyncio.create_task(box.exec(["sh", "-c", "sleep 61; true"], timeout_s=9))
    await asyncio.sleep(0.2)
    print(box._process._handle._pidfd and open(box._process.folder / "pid").read(), backend._state, flush=True)
    await running

asyncio.run(main())
"""


def test_s40_boxes_of_a_killed_owner_end_and_their_state_is_removed() -> None:
    try:
        runsc.find()
    except MissingDependency as error:
        pytest.skip(str(error))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout
        pid, state = owner.stdout.readline().decode().split()
        assert Path(state).is_dir()
        owner.kill()
    folder = runsc.state_folder()
    try:
        assert not Path(state).exists()
        end = time.monotonic() + 5
        while alive(pid) and time.monotonic() < end:
            time.sleep(0.01)
        assert not alive(pid)
        places = find_places()
        sweep(places)
        for place in places.controllers.values():
            assert not [path for path in place.folder.glob("lehr-*") if f"-{owner.pid}-" in path.name]
    finally:
        folder.rmdir()


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_snapshot_is_a_snapshot() -> None:
    snapshot = MemorySnapshot(SMALL, Path("/nonexistent"))
    assert snapshot.kind == "memory"
    asyncio.run(snapshot.discard())


def test_a_script_finds_what_a_plain_interpreter_has() -> None:
    async def use(box: GvisorBox, _: GvisorBackend) -> None:
        look = "import sys; print(sorted(set(sys.path) - {''})); exit(3)"
        forked = await box.exec(["python3", "-c", look])
        executed = await box.exec(["sh", "-c", f'exec python3 -c "{look}"'])
        assert (forked.exit_code, forked.stdout) == (3, executed.stdout) and executed.exit_code == 3

    in_box(use)
