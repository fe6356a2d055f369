"""The process from which every box of an image is forked: rights over the image's mounts, and no programs.

Bubblewrap lays the image out once and starts this server as process 1. A fork of it becomes process 1 of a
box: it enters namespaces of its own, completes them and gives every right up (:mod:`rights`), and serves
(:mod:`runner`). The interpreter and the modules that scripts use most are loaded by then.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
from typing import Any, NamedTuple

from lehr.sandbox.inside import layers, rights
from lehr.sandbox.inside.wire import Wire

PRELOADED = (
    "array", "bisect", "collections", "contextlib", "copy", "dataclasses", "datetime", "decimal", "enum",
    "fractions", "functools", "heapq", "io", "itertools", "json", "math", "operator", "random", "re", "string",
    "threading", "time", "traceback", "types", "typing",
)  # fmt: skip
"""What scripts use most. Each further module makes every fork dearer."""


WANTS_MAPS = -1
"""What a fork says that has made its user namespace; a fork that records a layer says 0 or an error number."""


class Birth(NamedTuple):
    """What a fork of the zygote is to become.

    control: its own socket to the host. doors: open ``cgroup.procs`` files, to be joined by writing 0.
    asks: where it says that its user namespace exists; mapped: where the zygote answers.
    """

    config: dict[str, Any]
    control: socket.socket
    doors: list[int]
    asks: int
    mapped: int

    def ask_for_maps(self) -> None:
        """Have the zygote map this process's new user namespace; returns once it is done."""
        os.write(self.asks, struct.pack("!ii", self.config["id"], WANTS_MAPS))
        answer = os.read(self.mapped, 4)
        code = struct.unpack("!i", answer)[0] if answer else errno.EPIPE
        if code:
            raise OSError(code, f"map users: {os.strerror(code)}")


class Newborn(NamedTuple):
    """A fork that has not got its users yet."""

    pid: int
    reply: int
    maps: list[list[int]]


class Zygote:
    """Serves the host's socket until it closes."""

    def __init__(self, control: socket.socket) -> None:
        self.wire = Wire(control)
        self.newborn: dict[int, Newborn] = {}
        self.recording: dict[int, int] = {}
        self.asks, self.asks_write = os.pipe2(os.O_CLOEXEC)
        self.own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def serve(self) -> Birth:
        """Fork a box for each request. Returns only in the forks."""
        config, _, _ = self.wire.receive()
        rights.become_zygote(config)
        layers.prepare()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        preload()
        config["plain_path"] = config["plain_path"] or [
            entry for entry in sys.path if entry and not entry.endswith("-packages")
        ]
        self.wire.send({"id": 0, "modules": len(sys.modules)})
        poll = select.poll()
        poll.register(self.wire.end, select.POLLIN)
        poll.register(self.asks, select.POLLIN)
        while True:
            for fd, _ in poll.poll():
                if fd == self.asks:
                    self.hear(*struct.unpack("!ii", os.read(self.asks, 8)))
                elif (birth := self.handle(config)) is not None:
                    return birth

    def handle(self, shared: dict[str, Any]) -> Birth | None:
        """Serve one request; returns only in the fork of a box what it is to become."""
        request, fds, _ = self.wire.receive()
        if request["op"] == "box":
            return self.fork(shared, request, fds)
        if request["op"] == "record":
            self.record(request, fds[0])
        elif request["op"] == "discard":
            layers.remove(request["layer"])
        return None

    def hear(self, number: int, word: int) -> None:
        """A fork has said something."""
        if word == WANTS_MAPS:
            self.map_users(number)
        elif number in self.recording:
            layer = self.recording.pop(number)
            if word == 0:
                layers.seal(layer)
                self.wire.send({"id": number, "bytes": layers.size(layer)})
            else:
                layers.remove(layer)
                self.wire.send({"id": number, "error": os.strerror(word), "errno": word})

    def record(self, request: dict[str, Any], disk: int) -> None:
        """Have a fork copy a box's disk into a new layer; it says so when it is done."""
        number, layer = request["id"], request["layer"]
        try:
            layers.make(layer, request["disk_bytes"], request["inodes"])
            pid = os.fork()
        except OSError as error:
            layers.remove(layer)
            self.wire.send({"id": number, "error": error.strerror, "errno": error.errno})
            pid = -1
        else:
            self.recording[number] = layer
        if pid == 0:
            word = errno.EIO
            try:
                layers.record(disk, layer)
                word = 0
            except OSError as error:
                word = error.errno or word
            finally:
                os.write(self.asks_write, struct.pack("!ii", number, word))
                os._exit(0)
        os.close(disk)

    def fork(self, shared: dict[str, Any], request: dict[str, Any], fds: list[int]) -> Birth | None:
        """Fork one box; returns what it is to become in the fork, None here."""
        mapped, reply = os.pipe2(os.O_CLOEXEC)
        try:
            pid = rights.fork_into_new_pids(self.own_pids)
        except OSError as error:
            os.close(reply)
            self.wire.send({"id": request["id"], "error": error.strerror})
        else:
            if pid == 0:
                return self.born(shared, request, fds, mapped)
            self.newborn[request["id"]] = Newborn(pid, reply, request["maps"])
            handle = os.pidfd_open(pid)
            self.wire.send({"id": request["id"]}, handle)
            os.close(handle)
        for fd in (*fds, mapped):
            os.close(fd)
        return None

    def born(self, shared: dict[str, Any], request: dict[str, Any], fds: list[int], mapped: int) -> Birth:
        """Keep of the zygote what a box needs, and close the rest."""
        self.wire.end.detach()
        control, *doors = fds
        rights.close_all_but({0, 1, 2, *fds, mapped, self.asks_write})
        config = {**shared, **request}
        return Birth(config, socket.socket(fileno=control), doors, self.asks_write, mapped)

    def map_users(self, number: int) -> None:
        """Write the user and group maps of a fork, and tell it."""
        newborn = self.newborn.pop(number, None)
        if newborn is None:
            return
        code = 0
        lines = "".join(f"{inner} {outer} 1\n" for inner, outer in newborn.maps)
        try:
            for name, text in (("setgroups", "deny"), ("uid_map", lines), ("gid_map", lines)):
                with open(f"/proc/{newborn.pid}/{name}", "w") as handle:
                    handle.write(text)
        except OSError as error:
            code = error.errno or errno.EIO
        with contextlib.suppress(OSError):
            os.write(newborn.reply, struct.pack("!i", code))
        os.close(newborn.reply)
        for old in [key for key in self.newborn if key < number - 1024]:  # died before it asked
            os.close(self.newborn.pop(old).reply)


def preload() -> None:
    """Import what scripts use most, and put it beyond the garbage collector so that forks share it."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
