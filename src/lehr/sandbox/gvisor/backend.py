"""The backend ``gvisor``: boxes restored from a container that has its interpreter loaded already.

Started by root, gVisor locks itself up as nobody in an empty root folder. Started by another user it runs as
``--rootless``: it keeps that user's rights on the host, so that gVisor's kernel alone isolates; runsc restores
nothing then, so that every box loads an interpreter and none can be recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from lehr.core.errors import HostUnfit, MissingDependency
from lehr.sandbox import boot, cgroup, host, image, seccomp
from lehr.sandbox.base import BACKENDS, Limits, Snapshot, Spec
from lehr.sandbox.bwrap import make_group
from lehr.sandbox.channel import ChannelLost
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.frames import StreamChannel
from lehr.sandbox.gvisor import bundle, runsc
from lehr.sandbox.gvisor.box import GvisorBox, MemorySnapshot
from lehr.sandbox.gvisor.sandbox import Sandbox, around
from lehr.sandbox.places import find_places
from lehr.sandbox.zygote import INSIDE, PARTS, inside_code

OWN = "relay"
READY_S = 20.0
log = logging.getLogger(__name__)


class GvisorBackend:
    """Makes boxes with ``runsc``. Life cycle: made anywhere, used in a running loop, ended by :meth:`close`.

    program: a runsc that is not on the PATH. limited: False puts no control group around boxes.
    """

    name = "gvisor"

    def __init__(self, *, program: str | None = None, limited: bool | None = None) -> None:
        self._program = program
        self._limited = limited
        self._boxes: set[GvisorBox] = set()
        self._numbers = itertools.count(1)
        self._preparing = asyncio.Lock()
        self._runsc: runsc.Runsc | None = None
        self._state = Path()
        self._closed = False

    # --- boxes

    async def create(self, spec: Spec, snapshot: Snapshot | None = None, *, ahead: bool = False) -> GvisorBox:
        """Make a box, or raise ``MissingDependency`` / ``HostUnfit`` / ``SandboxError`` with the next step."""
        sandbox, channel = await self.start(spec, snapshot)
        box = GvisorBox(spec, sandbox, channel, self)
        self._boxes.add(box)
        box.ended.add_done_callback(lambda _: self._boxes.discard(box))
        return box

    async def start(self, spec: Spec, snapshot: Snapshot | None = None) -> tuple[Sandbox, StreamChannel]:
        """Start the process of a box, fresh or from a recorded one."""
        if spec.image != "host":
            raise HostUnfit(f"the gvisor backend has no image {spec.image!r}", expected="image 'host'")
        if spec.allow_hosts:
            raise HostUnfit(
                "boxes on gVisor reach no host",
                expected="no allowed hosts",
                hint="Use the backend bwrap, whose boxes can be allowed some.",
            )
        recorded = self._recorded(spec, snapshot)
        await self._prepare()
        fresh = self._state / "fresh" if self._driver().restores else None
        sandbox, channel = await self._launch(spec.limits, recorded or fresh)
        try:
            async with asyncio.timeout(READY_S):
                if recorded:
                    await channel.adopt()
                else:
                    if fresh is None:
                        await _load(channel)
                    await self._settle(channel, sandbox, spec.limits)
        except BaseException as error:
            await self._end(sandbox, channel)
            if isinstance(error, ChannelLost | TimeoutError):
                raise HostUnfit(
                    "gVisor started, but the box did not answer", hint="Look into it: `runsc do true`"
                ) from error
            raise
        if sandbox.group:
            sandbox.group.throttle(True)
        return sandbox, channel

    def check(self, spec: Spec, snapshot: Snapshot) -> None:
        """Raise ``SandboxError`` if a box of the spec cannot be restored from it."""
        self._recorded(spec, snapshot)

    def _recorded(self, spec: Spec, snapshot: Snapshot | None) -> Path | None:
        if snapshot is None:
            return None
        if not isinstance(snapshot, MemorySnapshot) or not snapshot.image.is_relative_to(self._state):
            raise SandboxError(f"{snapshot.id} is not a snapshot of this backend")
        if snapshot.spec != spec:
            raise SandboxError(
                f"{snapshot.id} was taken of a box of another spec", expected=f"a box of {snapshot.spec}"
            )
        if not snapshot.image.exists():
            raise SandboxError(f"{snapshot.id} was discarded", expected="a snapshot that is still held")
        return snapshot.image

    async def _settle(self, channel: StreamChannel, sandbox: Sandbox, limits: Limits) -> None:
        """Tell a fresh runner what box it is."""
        plain_path, _ = inside_code(_python(), (OWN,))
        _, ready = channel.expect(0)
        channel.post(
            {
                "filter": seccomp.in_user_space().hex(),
                "plain_path": plain_path,
                "hidden": [*INSIDE, *(f"{INSIDE[-1]}.{name}" for name in (*PARTS, OWN))],
                "disk_bytes": limits.disk_bytes,
                "memory_bytes": limits.memory_bytes,
                "pids": limits.pids,
                "cpu_s": None if sandbox.group else limits.cpu_s,
            }
        )
        answer = await ready
        if "error" in answer.header:
            raise HostUnfit(f"gVisor refuses a part of the box: {answer.header['error']}", hint=runsc.INSTALL)

    async def record(self, sandbox: Sandbox, channel: StreamChannel) -> Path:
        """Record a box; see :class:`~lehr.sandbox.gvisor.box.Recorder`.

        runsc ends a container when it records it: the box goes on as a restored one, in the same group.
        """
        driver = self._driver()
        if not driver.restores:
            raise HostUnfit(
                "runsc restores nothing for a user that is not root, so the box cannot be recorded",
                hint="Start as root, or use the backend bwrap, which records the disk",
            )
        if channel.lost:
            raise SandboxError("the box cannot be recorded: it is gone")
        recorded = self._state / f"recorded-{next(self._numbers)}"
        recorded.mkdir(mode=0o700)
        try:
            async with asyncio.timeout(READY_S):
                await channel.hold()
            channel.detach()
            if sandbox.group:
                sandbox.group.throttle(False)
            await driver.checkpoint(sandbox.folder, sandbox.name, recorded)
            if not await sandbox.left(READY_S):
                raise SandboxError("runsc recorded the box, but it did not end")
            folder, name = self._place()
            pid, ends = await self._run(folder, name, sandbox.group, recorded)
            sandbox.replace(pid, folder, name)
            async with asyncio.timeout(READY_S):
                await channel.attach(ends)
            if sandbox.group:
                sandbox.group.throttle(True)
        except BaseException as error:
            sandbox.kill()
            channel.close()
            await asyncio.to_thread(shutil.rmtree, recorded, ignore_errors=True)
            if isinstance(error, TimeoutError | ChannelLost):
                raise SandboxError("the box cannot be recorded: it does not answer") from error
            raise
        return recorded

    async def close(self) -> None:
        """Destroy every box and discard every snapshot that is left."""
        self._closed = True
        await asyncio.gather(*(box.destroy() for box in list(self._boxes)))
        async with self._preparing:
            if self._runsc is not None:
                self._runsc = None
                await asyncio.to_thread(runsc.clear, self._state)

    # --- containers

    def _place(self) -> tuple[Path, str]:
        """Make the folder of a container, and its name, which is unique on this host."""
        folder = self._state / f"box-{next(self._numbers)}"
        folder.mkdir(mode=0o700)
        return folder, f"lehr-{secrets.token_hex(6)}"

    def _group(self, limits: Limits) -> cgroup.Group | None:
        places = find_places() if self._limited is not False else None
        if places is None or not places.usable:
            return None
        memory, pids = around(limits)
        group = make_group(places, Spec(limits=dataclasses.replace(limits, memory_bytes=memory, pids=pids)))
        group.throttle(False)
        return group

    async def _launch(self, limits: Limits, recorded: Path | None) -> tuple[Sandbox, StreamChannel]:
        folder, name = self._place()
        group = None
        try:
            group = self._group(limits)
            pid, ends = await self._run(folder, name, group, recorded)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(_clear, folder, group)))
            raise
        return Sandbox(pid, group, folder, name), StreamChannel(asyncio.get_running_loop(), ends)

    async def _run(
        self, folder: Path, name: str, group: cgroup.Group | None, recorded: Path | None
    ) -> tuple[int, tuple[int, int]]:
        """Start a container; return its process and the host's ends of its output and input."""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            stdin, inward = os.pipe2(os.O_CLOEXEC)
            theirs.callback(os.close, stdin)
            ours.callback(os.close, inward)
            outward, stdout = os.pipe2(os.O_CLOEXEC)
            theirs.callback(os.close, stdout)
            ours.callback(os.close, outward)
            pid = await self._driver().start(folder, name, (stdin, stdout), group, recorded)
            ours.pop_all()
            return pid, (outward, inward)

    def _driver(self) -> runsc.Runsc:
        if self._closed or self._runsc is None:
            raise SandboxError("the backend is closed")
        return self._runsc

    async def _end(self, sandbox: Sandbox, channel: StreamChannel) -> None:
        channel.close()
        await asyncio.shield(asyncio.ensure_future(sandbox.gone()))

    async def _prepare(self) -> None:
        """Once: write the bundle, start a container, and record it as soon as its interpreter is loaded."""
        async with self._preparing:
            if self._closed:
                raise SandboxError("the backend is closed")
            if self._runsc is not None:
                return
            program, python = runsc.find(self._program), _python()
            try:
                await _to_its_end(functools.partial(self._lay_out, [python, "-c", boot.program(OWN)]))
                self._runsc = runsc.Runsc(program, self._state)
                if self._runsc.restores:
                    await self._record_fresh()
            except BaseException:
                self._runsc = None
                await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(runsc.clear, self._state)))
                raise

    def _lay_out(self, argv: Sequence[str]) -> None:
        self._state = runsc.state_folder()
        bundle.write(self._state, argv)

    async def _record_fresh(self) -> None:
        sandbox, channel = await self._launch(Limits(), None)
        try:
            async with asyncio.timeout(READY_S):
                await _load(channel)
            channel.detach()
            fresh = self._state / "fresh"
            fresh.mkdir(mode=0o700)
            await self._driver().checkpoint(sandbox.folder, sandbox.name, fresh)
            await sandbox.left(READY_S)
        except (ChannelLost, TimeoutError) as error:
            said = (sandbox.folder / "said").read_text(errors="replace").strip()[-runsc.SAID_BYTES :]
            raise HostUnfit(
                f"gVisor could not start an interpreter: {said or 'it ended without a word'}", hint=host.DOCTOR
            ) from error
        finally:
            await self._end(sandbox, channel)


async def _load(channel: StreamChannel) -> None:
    _, code = inside_code(_python(), (OWN,))
    await boot.load(channel, code)


def _python() -> str:
    python = image.system_python()
    if python is None:
        raise MissingDependency(
            "no python3 in the system folders that a box may see",
            expected="/usr/bin/python3",
            hint="Install it: `apt-get install python3`",
        )
    return python


async def _to_its_end(work: Callable[[], None]) -> None:
    """Do work in a thread. A cancelled caller waits for its end, so that nothing is made behind its back."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _clear(folder: Path, group: cgroup.Group | None) -> None:
    if group:
        group.kill()
    runsc.clear(folder)
    if group:
        group.remove()


if "gvisor" not in list(BACKENDS):
    BACKENDS.register("gvisor", GvisorBackend)
