"""The default backend: bubblewrap, a libseccomp filter, and cgroups where this host lets us write them.

Bubblewrap lays the image out once; each box is a fork out of it. See ``inside/zygote.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import shutil
import socket
from dataclasses import replace

from lehr.core.errors import HostUnfit, MissingDependency
from lehr.sandbox import cgroup, host, roots, seccomp
from lehr.sandbox.base import BACKENDS, Snapshot, Spec
from lehr.sandbox.box import FileSnapshot, RunnerBox
from lehr.sandbox.channel import Channel, ChannelLost
from lehr.sandbox.egress import Rule
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.images.halt import in_thread, shared
from lehr.sandbox.launch import PATH, Process
from lehr.sandbox.places import Places, find_places
from lehr.sandbox.zygote import READY_S, Layers, Zygote

log = logging.getLogger(__name__)


class BwrapBackend:
    """Makes boxes with bubblewrap. As root each box runs as an unprivileged user number of its own.

    limited: False never uses cgroups; None uses them where they can be written.
    """

    name = "bwrap"

    def __init__(self, *, limited: bool | None = None) -> None:
        self._limited = limited
        self._boxes: set[RunnerBox] = set()
        self._zygotes: dict[str, Zygote] = {}
        self._hatching = asyncio.Lock()
        self._finding: dict[str, asyncio.Task[roots.Image]] = {}
        self._closed = False

    def _places(self) -> Places | None:
        if self._limited is False:
            return None
        places = find_places()
        if places.usable:
            return places
        _warn_unlimited("; ".join(f"{name}: {why}" for name, why in sorted(places.lacking.items())))
        return None

    async def create(self, spec: Spec, snapshot: Snapshot | None = None, *, ahead: bool = False) -> RunnerBox:
        """Make a box, or raise ``MissingDependency`` / ``HostUnfit`` with the next step."""
        process, channel = await self.start(spec, snapshot, ahead=ahead)
        box = RunnerBox(spec, process, channel, self, process.layers.zygote.env)
        self._boxes.add(box)
        box.ended.add_done_callback(lambda _: self._boxes.discard(box))
        return box

    async def start(
        self, spec: Spec, snapshot: Snapshot | None = None, *, ahead: bool = False
    ) -> tuple[Process, Channel]:
        """Start process 1 of a box."""
        program = shutil.which("bwrap", path=PATH)
        if program is None:
            raise MissingDependency(
                "bubblewrap (bwrap) is not installed", hint="Install it: `apt-get install bubblewrap`"
            )
        for text in spec.allow_hosts:
            Rule.parse(text)
        base = self._base(spec, snapshot)
        places = self._places()
        zygote = base.zygote if base else await self._hatch(program, spec.image)
        group = make_group(places, spec, ahead=ahead) if places else None
        try:
            process, channel = await self._fork(zygote, spec, group, base)
        except ChannelLost as error:
            if group:
                group.remove()
            raise host.unfit(zygote.said) from error
        except BaseException:
            if group:
                group.remove()
            raise
        try:
            given = await self._wait_ready(channel)
            process.take(given, spec)
        except BaseException as error:
            process.kill()
            channel.close()
            await asyncio.shield(asyncio.get_running_loop().create_task(process.gone()))
            if isinstance(error, ChannelLost | TimeoutError):
                raise host.unfit(zygote.said) from error
            raise
        return process, channel

    def check(self, spec: Spec, snapshot: Snapshot) -> None:
        """Raise ``SandboxError`` if a box of the spec cannot be restored from it."""
        self._base(spec, snapshot)

    def _base(self, spec: Spec, snapshot: Snapshot | None) -> Layers | None:
        if snapshot is None:
            return None
        if not isinstance(snapshot, FileSnapshot):
            raise SandboxError(f"{snapshot.id} is not a snapshot of the bwrap backend")
        if replace(snapshot.spec, allow_hosts=spec.allow_hosts) != spec:  # files are the same with any network
            raise SandboxError(
                f"{snapshot.id} was taken of a box of another spec", expected=f"a box of {snapshot.spec}"
            )
        if not snapshot.layers.held:
            raise SandboxError(f"{snapshot.id} was discarded", expected="a snapshot that is still held")
        if snapshot.layers.zygote.lost:
            raise SandboxError(f"{snapshot.id} is gone: the process that held it has ended")
        return snapshot.layers

    async def _hatch(self, program: str, name: str) -> Zygote:
        """Return the image's zygote, started if there is none that lives."""
        zygote = self._zygotes.get(name)
        system = await self._find(name) if zygote is None or zygote.lost else None
        async with self._hatching:
            allow_descriptors()
            if self._closed:
                raise SandboxError("the backend is closed")
            zygote = self._zygotes.get(name)
            if zygote is None or zygote.lost:
                if zygote is not None:
                    await zygote.close()
                system = system or await self._find(name)
                filters = [
                    (*seccomp.programs(limited=limited), seccomp.asking(limited=limited))
                    for limited in (True, False)
                ]
                self._zygotes[name] = zygote = await Zygote.start(program, system, filters)
            return zygote

    async def _find(self, name: str) -> roots.Image:
        """Return the image of a name, looked for once at a time: one that has to be built takes minutes, goes
        on when who asked is cancelled, and holds no box of another image up. :meth:`close` ends it.
        """
        if self._closed:
            raise SandboxError("the backend is closed")
        finding = self._finding.get(name)
        if finding is None:
            finding = asyncio.get_running_loop().create_task(in_thread(roots.find, name))
            self._finding[name] = finding
            finding.add_done_callback(lambda done: self._forget(name, done))
        return await shared(finding, f"the search for the image {name}")

    def _forget(self, name: str, done: asyncio.Task[roots.Image]) -> None:
        del self._finding[name]
        if not done.cancelled():
            done.exception()  # nobody may be waiting for it any more

    async def _fork(
        self, zygote: Zygote, spec: Spec, group: cgroup.Group | None, base: Layers | None
    ) -> tuple[Process, Channel]:
        limits = spec.limits
        config = {
            "watch": group is None,
            "disk_bytes": limits.disk_bytes,
            "inodes": limits.inodes,
            "memory_bytes": limits.memory_bytes,
            "pids": limits.pids,
            "cpu_s": limits.cpu_s,
            "proxy": bool(spec.allow_hosts),
        }
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as opened:
            opened.callback(theirs.close)
            undo = opened.enter_context(contextlib.ExitStack())
            undo.callback(ours.close)
            doors = [os.open(door, os.O_WRONLY | os.O_CLOEXEC) for door in (group.doors if group else ())]
            for door in doors:
                opened.callback(os.close, door)
            async with asyncio.timeout(READY_S):
                pidfd, stand = await zygote.fork(config, theirs.fileno(), doors, base)
            undo.pop_all()
        process = Process(pidfd, group, stand)
        return process, Channel(asyncio.get_running_loop(), ours)

    async def _wait_ready(self, channel: Channel) -> dict[str, int]:
        """Return the descriptors that process 1 gives to the host, by name."""
        _, ready = channel.expect(0)
        async with asyncio.timeout(READY_S):
            answer = await ready
        if "error" in answer.header:
            raise HostUnfit(
                f"cannot finish the box: {answer.header['error']}",
                expected="a kernel that lets a user namespace mount proc and tmpfs",
                hint=host.DOCTOR,
            )
        return dict(zip(answer.header["gives"], answer.fds, strict=True))

    async def close(self) -> None:
        """Destroy every box that is left, and end what is being built."""
        self._closed = True
        finding = list(self._finding.values())
        for task in finding:
            task.cancel()
        await asyncio.gather(*finding, return_exceptions=True)
        await asyncio.gather(*(box.destroy() for box in list(self._boxes)))
        async with self._hatching:
            for zygote in self._zygotes.values():
                await zygote.close()


@functools.cache
def allow_descriptors() -> None:
    """Let this process open as many files as it may: each box takes two, and more while a program runs."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


@functools.cache
def _warn_unlimited(why: str) -> None:
    log.warning(
        "cgroups cannot be written here (%s); boxes are limited by rlimits instead, which count each process "
        "by itself. `lehr doctor` names the command that mends it.",
        why,
    )


def make_group(places: Places, spec: Spec, *, ahead: bool = False) -> cgroup.Group:
    """Make the control group of a box, or raise ``HostUnfit``."""
    try:
        return cgroup.Group(places, spec.limits, hurried=not ahead)
    except OSError as error:
        raise HostUnfit(f"cannot make a control group: {error}", hint=host.DOCTOR) from error


if "bwrap" not in list(BACKENDS):
    BACKENDS.register("bwrap", BwrapBackend)
