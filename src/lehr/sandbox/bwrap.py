"""The default backend: bubblewrap, a libseccomp filter, and cgroups where this host lets us write them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import marshal
import os
import shutil
import socket
import struct
import subprocess
from pathlib import Path

from lehr.core.errors import HostUnfit, MissingDependency
from lehr.sandbox import cgroup, host, image, seccomp
from lehr.sandbox.base import BACKENDS, Spec
from lehr.sandbox.box import RunnerBox
from lehr.sandbox.channel import Channel, ChannelLost
from lehr.sandbox.launch import PATH, Process, as_box_user

BOOT = """
import marshal, socket, struct, sys, types
control = socket.socket(fileno=int(sys.argv[1]))
size = struct.unpack("!I", control.recv(4, socket.MSG_WAITALL))[0]
for name, code in marshal.loads(control.recv(size, socket.MSG_WAITALL)):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    exec(code, module.__dict__)
module.serve(control)
"""
COMPILE = """
import marshal, sys
parts = marshal.loads(sys.stdin.buffer.read())
sys.stdout.buffer.write(marshal.dumps([(n, compile(s, n, "exec", dont_inherit=True)) for n, s in parts], 2))
"""
INSIDE = ("lehr", "lehr.sandbox", "lehr.sandbox.inside")
PARTS = ("rights", "files", "programs", "runner")
READY_S = 20.0
DOCTOR = "Run `lehr doctor` for what is missing and the command that mends it"
NAMESPACES = (
    "--unshare-user",
    "--unshare-ipc",
    "--unshare-pid",
    "--unshare-net",
    "--unshare-uts",
    "--unshare-cgroup-try",
)
RIGHTS = ("--cap-add", "CAP_SYS_ADMIN", "--cap-add", "CAP_SETPCAP", "--cap-add", "CAP_SYS_RESOURCE")
"""Inside the box's own user namespace, for the runner's set-up alone; it drops them before serving."""


log = logging.getLogger(__name__)


@functools.cache
def runner_code(python: str) -> bytes:
    """Return the runner's modules, compiled once by the interpreter that will run them."""
    parts = [(name, "") for name in INSIDE]
    folder = Path(__file__).with_name("inside")
    parts += [(f"{INSIDE[-1]}.{name}", (folder / f"{name}.py").read_text()) for name in PARTS]
    done = subprocess.run(
        [python, "-I", "-S", "-c", COMPILE],
        input=marshal.dumps(parts, 2),
        capture_output=True,
        cwd="/",
        env={},
        timeout=READY_S,
    )
    if done.returncode != 0:
        raise HostUnfit(
            f"{python} cannot compile the runner: {done.stderr.decode(errors='replace').strip()[-300:]}",
            expected="python3 of version 3.9 or later",
        )
    return done.stdout


class BwrapBackend:
    """Makes boxes with bubblewrap. As root each box runs as an unprivileged user number of its own.

    limited: False never uses cgroups; None uses them where they can be written.
    """

    name = "bwrap"

    def __init__(self, *, limited: bool | None = None) -> None:
        self._limited = limited
        self._boxes: set[RunnerBox] = set()

    def _places(self) -> cgroup.Places | None:
        if self._limited is False:
            return None
        places = cgroup.find()
        if places.usable:
            return places
        _warn_unlimited("; ".join(f"{name}: {why}" for name, why in sorted(places.lacking.items())))
        return None

    async def create(self, spec: Spec) -> RunnerBox:
        """Make a fresh box, or raise ``MissingDependency`` / ``HostUnfit`` with the next step."""
        program = shutil.which("bwrap", path=PATH)
        if program is None:
            raise MissingDependency(
                "bubblewrap (bwrap) is not installed", hint="Install it: `apt-get install bubblewrap`"
            )
        python = image.system_python()
        if python is None:
            raise MissingDependency(
                "no python3 in the system folders that a box may see",
                expected="/usr/bin/python3",
                hint="Install it: `apt-get install python3`",
            )
        if spec.image != "host":
            raise HostUnfit(f"the bwrap backend has no image {spec.image!r}", expected="image 'host'")
        places = self._places()
        rules, code = seccomp.program(limited=places is not None), runner_code(python)
        group = make_group(places, spec) if places else None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as opened:
            opened.callback(theirs.close)
            fds, files = etc_files(opened)
            argv = self._argv(program, python, files, theirs.fileno())
            try:
                process = Process(argv, group, [*fds, theirs.fileno()])
            except OSError as error:
                ours.close()
                if group:
                    group.remove()
                raise HostUnfit(f"cannot start bubblewrap: {error.strerror}", hint=DOCTOR) from error
        channel = Channel(loop, ours)
        try:
            await self._wait_ready(channel, spec, code, rules, limited=group is not None)
        except BaseException as error:
            process.kill()
            channel.close()
            await asyncio.shield(loop.create_task(process.gone()))
            if isinstance(error, ChannelLost | TimeoutError):
                raise unfit(process) from error
            raise
        process.adopt()
        box = RunnerBox(spec, process, channel)
        self._boxes.add(box)
        process.ended.add_done_callback(lambda _: self._boxes.discard(box))
        return box

    def _argv(self, program: str, python: str, files: list[str], control: int) -> list[str]:
        argv = [*as_box_user(), program, "--info-fd", "INFO", *NAMESPACES]
        argv += ["--uid", "1000", "--gid", "1000", "--hostname", "box"]
        argv += ["--new-session", "--die-with-parent", "--as-pid-1", "--clearenv", *RIGHTS]
        argv += [*image.arguments(), *files, "--remount-ro", "/"]
        return [*argv, "--", python, "-I", "-S", "-c", BOOT, str(control)]

    async def _wait_ready(
        self, channel: Channel, spec: Spec, code: bytes, rules: bytes, *, limited: bool
    ) -> None:
        limits = spec.limits
        _, ready = channel.expect(0)
        config = {
            "id": 0,
            "filter": rules.hex(),
            "watch": not limited,
            "disk_bytes": limits.disk_bytes,
            "inodes": limits.inodes,
            "memory_bytes": limits.memory_bytes,
            "pids": limits.pids,
            "cpu_s": limits.cpu_s,
        }
        async with asyncio.timeout(READY_S):
            await channel.send_raw(struct.pack("!I", len(code)) + code)
            await channel.send(config)
            answer = await ready
        if "error" in answer.header:
            raise HostUnfit(
                f"cannot finish the box: {answer.header['error']}",
                expected="a kernel that lets a user namespace mount tmpfs",
                hint=DOCTOR,
            )

    async def close(self) -> None:
        """Destroy every box that is left."""
        await asyncio.gather(*(box.destroy() for box in list(self._boxes)))


@functools.cache
def _warn_unlimited(why: str) -> None:
    log.warning(
        "cgroups cannot be written here (%s); boxes are limited by rlimits instead, which count each process "
        "by itself. `lehr doctor` names the command that mends it.",
        why,
    )


def make_group(places: cgroup.Places, spec: Spec) -> cgroup.Group:
    """Make the control group of a box, or raise ``HostUnfit``."""
    try:
        return cgroup.Group(places, spec.limits)
    except OSError as error:
        raise HostUnfit(f"cannot make a control group: {error}", hint=DOCTOR) from error


def etc_files(opened: contextlib.ExitStack) -> tuple[list[int], list[str]]:
    """Return descriptors of the made-up files of ``/etc`` and the arguments that place them."""
    fds: list[int] = []
    args: list[str] = []
    for path, data in image.ETC_FILES:
        fd = os.memfd_create("etc")
        opened.callback(os.close, fd)
        os.write(fd, data)
        os.lseek(fd, 0, os.SEEK_SET)
        fds.append(fd)
        args += ["--perms", "0444", "--ro-bind-data", str(fd), path]
    return fds, args


def unfit(process: Process) -> HostUnfit:
    """Return the error for a box that did not come up, with the mend if what is lacking can be found."""
    said = process.errors_kept or "it ended without a word"
    lacks = [lack for lack in host.probe().lacks if lack.needed]
    hint = f"{lacks[0].name}: {lacks[0].why}. Mend it: `{lacks[0].mend}`" if lacks else DOCTOR
    return HostUnfit(f"bubblewrap could not make a box: {said}", hint=hint)


if "bwrap" not in list(BACKENDS):
    BACKENDS.register("bwrap", BwrapBackend)
