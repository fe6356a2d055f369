"""The host's side of the zygote: started once per backend through bubblewrap, asked for a process 1 per box."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import marshal
import os
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lehr.core.errors import HostUnfit
from lehr.sandbox import image
from lehr.sandbox.channel import Channel, ChannelLost
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.host import unfit
from lehr.sandbox.launch import Server
from lehr.sandbox.roots import Image
from lehr.sandbox.users import Users, choose_users

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
    exec(compile(code, name, "exec") if isinstance(code, str) else code, module.__dict__)
inside = sys.modules["lehr.sandbox.inside"]
inside.script.run(inside.runner.serve(inside.zygote.Zygote(control).serve()))
"""
COMPILE = """
import marshal, sys
parts = marshal.loads(sys.stdin.buffer.read())
parts = [(n, compile(s, n, "exec", dont_inherit=True)) for n, s in parts]
sys.stdout.buffer.write(marshal.dumps((sys.path, marshal.dumps(parts, 2)), 2))
"""
INSIDE = ("lehr", "lehr.sandbox", "lehr.sandbox.inside")
PARTS = ("wire", "rights", "layers", "files", "script", "programs", "zygote", "runner")
NAMESPACES = (
    "--unshare-user",
    "--unshare-ipc",
    "--unshare-pid",
    "--unshare-net",
    "--unshare-uts",
    "--unshare-cgroup-try",
)
RIGHTS = (
    "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "NET_ADMIN", "SETGID", "SETPCAP", "SETUID", "SYS_ADMIN",
    "SYS_RESOURCE",
)  # fmt: skip
"""Over the image's own user namespace. Boxes are forked out of it into namespaces over which they have none."""
READY_S = 20.0
RECORD_S = 30.0
LEAVE_S = 2.0


OWN = 1000
"""The zygote's user inside its namespace where there is only one."""


@functools.cache
def inside_code(python: str, more: tuple[str, ...] = ()) -> tuple[list[str], bytes]:
    """Return the path of a bare interpreter, and the modules, compiled once by the one that will run them."""
    parts = [(name, "") for name in INSIDE]
    folder = Path(__file__).with_name("inside")
    parts += [(f"{INSIDE[-1]}.{name}", (folder / f"{name}.py").read_text()) for name in (*PARTS, *more)]
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
            expected="python3 of version 3.10 or later",
        )
    path, code = marshal.loads(done.stdout)
    return path, code


def inside_source(more: tuple[str, ...] = ()) -> bytes:
    """Return the modules as source, for an interpreter that is not this host's."""
    folder = Path(__file__).with_name("inside")
    parts = [(name, "") for name in INSIDE]
    parts += [(f"{INSIDE[-1]}.{name}", (folder / f"{name}.py").read_text()) for name in (*PARTS, *more)]
    return marshal.dumps(parts, 2)


class Zygote:
    """Life cycle: :meth:`start`, :meth:`fork` for each box, :meth:`close`. Its end is the end of its boxes.

    server: bubblewrap with the zygote as its process 1. channel: to the zygote. env: of programs in its boxes.
    """

    def __init__(self, server: Server, channel: Channel, users: Users, env: Mapping[str, str]) -> None:
        self.env = env
        self._server = server
        self._channel = channel
        self._users = users
        self._pairs = itertools.cycle(range(1, max(2, users.count // 2)))
        self._pair_uses: dict[int, int] = {}
        self._layers = itertools.count(1)
        self._uses: dict[int, int] = {}

    @classmethod
    async def start(cls, program: str, system: Image, filters: Sequence[Sequence[bytes]]) -> Zygote:
        """Lay the image out and load the interpreter. Raises ``HostUnfit`` with what bubblewrap said."""
        users, loop = choose_users(), asyncio.get_running_loop()
        plain_path, code = inside_code(system.python) if system.own else ([], inside_source())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as opened:
            opened.callback(theirs.close)
            info, info_write = os.pipe2(os.O_CLOEXEC)
            opened.callback(os.close, info)
            fds, files = etc_files(opened)
            argv = [program, "--info-fd", str(info_write)]
            block, ready = os.pipe2(os.O_CLOEXEC)
            opened.callback(os.close, ready)
            opened.callback(os.close, block)
            if users.apart:
                argv += ["--userns-block-fd", str(block)]
                fds.append(block)
            inner = 0 if users.apart else OWN
            argv += [*NAMESPACES, "--uid", str(inner), "--gid", str(inner), "--new-session"]
            argv += ["--die-with-parent", "--as-pid-1", "--clearenv"]
            argv += [word for item in image.ENVIRONMENT.items() for word in ("--setenv", *item)]
            argv += [word for right in RIGHTS for word in ("--cap-add", f"CAP_{right}")]
            argv += [*system.arguments, *(files if system.own else ()), "--remount-ro", "/"]
            argv += ["--", system.python, "-c", BOOT, str(theirs.fileno())]
            try:
                server = Server(argv, [*fds, info_write, theirs.fileno()], users.other)
            except OSError as error:
                ours.close()
                raise HostUnfit(f"cannot start bubblewrap: {error.strerror}") from error
            finally:
                os.close(info_write)
            theirs.close()  # so that the other end's is noticed
            channel = Channel(loop, ours)
            zygote = cls(server, channel, users, {**image.ENVIRONMENT, **system.env})
            try:
                async with asyncio.timeout(READY_S):
                    if users.apart:
                        said = b""
                        while not said.rstrip().endswith(b"}"):
                            await _readable(loop, info)
                            said += os.read(info, 4096) or b"}"
                        _map(json.loads(said)["child-pid"], users)
                        os.write(ready, b"!!")
                    await zygote._wait_ready(code, plain_path, filters)
            except BaseException as error:
                words = server.said
                os.write(
                    ready, b"!!"
                )  # killed while it waits, bubblewrap would leave a child that waits for ever
                channel.close()
                await asyncio.shield(loop.create_task(server.close(LEAVE_S)))
                if isinstance(error, ChannelLost | TimeoutError | OSError | ValueError):
                    raise unfit(words or str(error)) from error
                raise
        return zygote

    async def _wait_ready(self, code: bytes, plain_path: list[str], filters: Sequence[Sequence[bytes]]) -> None:
        _, ready = self._channel.expect(0)
        await self._channel.send_raw(struct.pack("!I", len(code)) + code)
        config = {
            "user": 0 if self._users.apart else OWN,
            "apart": self._users.apart,
            "filters": [[program.hex() for program in pair] for pair in filters],
            "masked": image.MASKED_PROC,
            "plain_path": plain_path,
            "hidden": [*INSIDE, *(f"{INSIDE[-1]}.{name}" for name in PARTS)],
            "base_env": image.ENVIRONMENT,
        }
        await self._channel.send(config)
        await ready

    @property
    def said(self) -> str:
        """What it complained about."""
        return self._server.said

    @property
    def lost(self) -> bool:
        """Whether it has ended."""
        return self._channel.lost

    async def fork(
        self, config: Mapping[str, Any], control: int, doors: Sequence[int], base: Layers | None
    ) -> tuple[int, Layers]:
        """Fork a process 1 that speaks on ``control``. Returns its pidfd, and what it stands on, which it owns.

        doors: open ``cgroup.procs`` files, which it joins before anything else. base: what it starts from.
        Raises ``ChannelLost`` if the zygote has ended, ``HostUnfit`` if the kernel refuses.
        """
        stand = base.share() if base else Layers(self, (), self._take())
        pair = stand.pair
        users = [[999, 2 * pair], [1000, 2 * pair + 1]] if self._users.apart else [[OWN, OWN]]
        request = {"op": "box", **config, "maps": users, "candidate": users[-1][1], "layers": stand.numbers}
        try:
            answer = await self._channel.ask(request, (control, *doors))
            if "error" in answer.header:
                raise HostUnfit(f"the kernel refuses a process for a box: {answer.header['error']}")
        except BaseException:
            stand.free()
            raise
        return answer.fds[0], stand

    async def record(self, disk: int, below: Layers, disk_bytes: int, inodes: int) -> tuple[Layers, int]:
        """Copy a box's disk, an open folder, into a layer on top of what the box stands on; also say how many
        bytes the layer takes.
        """
        number = next(self._layers)
        size = {"layer": number, "disk_bytes": disk_bytes, "inodes": inodes}
        async with asyncio.timeout(RECORD_S):
            answer = await self._channel.ask({"op": "record", **size}, (disk,))
        if "error" in answer.header:
            raise SandboxError(f"cannot record the box's disk: {answer.header['error']}")
        self._uses[number] = 0
        return below.share(number), answer.header["bytes"]

    def _take(self) -> int:
        if not self._users.apart:
            return 0
        return next(pair for pair in self._pairs if not self._pair_uses.get(pair))

    def hold(self, stand: Layers) -> None:
        """Count one more user of a pair of users and of layers."""
        self._pair_uses[stand.pair] = self._pair_uses.get(stand.pair, 0) + 1
        for number in stand.numbers:
            self._uses[number] += 1

    def let_go(self, stand: Layers) -> None:
        """Count one user less; layers that nobody uses are discarded."""
        self._pair_uses[stand.pair] -= 1
        if not self._pair_uses[stand.pair]:
            del self._pair_uses[stand.pair]
        for number in stand.numbers:
            self._uses[number] -= 1
            if not self._uses[number]:
                del self._uses[number]
                self._channel.send_now({"op": "discard", "id": 0, "layer": number})

    async def close(self) -> None:
        """End it, and with it every box that is left. Idempotent."""
        self._channel.close()
        await self._server.close()


class Layers:
    """What a box stands on: recorded layers, and the pair of users to whom the files in them belong.

    Counted, so that neither is given to others while a box or a snapshot uses it.
    """

    def __init__(self, zygote: Zygote, numbers: tuple[int, ...], pair: int) -> None:
        self.zygote = zygote
        self.numbers = numbers
        self.pair = pair
        self.held = True
        zygote.hold(self)

    def share(self, *more: int) -> Layers:
        """Return the same for another owner, with layers on top. Raises ``SandboxError`` once it is free."""
        if not self.held:
            raise SandboxError("what the box was to stand on was discarded")
        return Layers(self.zygote, (*self.numbers, *more), self.pair)

    def free(self) -> None:
        """Give it up. Idempotent."""
        if self.held:
            self.held = False
            self.zygote.let_go(self)


def _map(pid: int, users: Users) -> None:
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{name}").write_text(f"0 {users.first} {users.count}\n")


async def _readable(loop: asyncio.AbstractEventLoop, fd: int) -> None:
    future: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, lambda: future.done() or future.set_result(None))
    try:
        await future
    finally:
        loop.remove_reader(fd)


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
