"""The loop of process 1 of a box: programs started, ends reported, files lent."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from typing import Any

from lehr.sandbox.inside import files, programs, rights, script
from lehr.sandbox.inside.wire import CHUNK, Wire, farewell
from lehr.sandbox.inside.zygote import Birth

SWEEP_S = 1.0
LOOK_S = 0.02
NAP_S = 0.0005


class Runner:
    """Serves the control socket until it closes; then the box ends with it."""

    def __init__(self, birth: Birth) -> None:
        self.wire = Wire(birth.control)
        self.birth = birth
        self.apart: bool = birth.config["apart"]
        self.execs: dict[int, programs.Exec] = {}
        self.watch: dict[str, Any] | None = birth.config if birth.config["watch"] else None
        self.looked = 0.0

    def serve(self) -> script.Script:
        """Set the box up, say so, and serve. Returns only in forks, with the script that they are to run."""
        try:
            self.held = rights.set_up(self.birth)
        except OSError as error:
            self.wire.send({"id": 0, "error": str(error)})
            farewell()
        signal.signal(signal.SIGCHLD, _wake)
        wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        given = self.held.for_host
        self.wire.send({"id": 0, "gives": list(given)}, *given.values())
        for fd in given.values():
            os.close(fd)
        poll = select.poll()
        poll.register(self.wire.end, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            watched = self.watch is not None and bool(self.execs)
            for fd, _ in poll.poll(LOOK_S * 1000 if watched else None):
                if fd == wake:
                    os.read(wake, 4096)
                elif (todo := self.handle()) is not None:
                    self.wire.end.detach()
                    return todo
            self.reap()
            if watched:
                self.look()

    def handle(self) -> script.Script | None:
        """Serve one request. Returns a script only in the fork that is to run it."""
        request, fds, payload = self.wire.receive()
        operation = request["op"]
        try:
            if operation == "exec":
                started = programs.start(request, fds, self.spent(), apart=self.apart)
                if isinstance(started, script.Script):
                    config = self.birth.config
                    return started._replace(plain_path=config["plain_path"], hidden=config["hidden"])
                self.execs[started.pid] = started
            elif operation == "kill":
                self.kill(request["target"], children_only=request["children"])
            elif operation == "write":
                self.write(request, payload)
            elif operation == "open":
                self.lend(request["id"], files.open_to_read(request["path"]))
            elif operation == "tree":
                self.tree(request, fds[0])
            elif operation == "hold":
                _signal(-1, signal.SIGSTOP)
                self.wire.send({"id": request["id"]}, self.held.disk)
            elif operation == "go":
                _signal(-1, signal.SIGCONT)
                self.wire.send({"id": request["id"]})
        except OSError as error:
            self.wire.send({"id": request["id"], "error": error.strerror or str(error), "errno": error.errno})
        except ValueError as error:  # a name that no file can have
            self.wire.send({"id": request["id"], "error": str(error)})
        for fd in fds:
            os.close(fd)
        return None

    # --- files

    def write(self, request: dict[str, Any], left: int) -> None:
        """Store the payload; whatever happens, all of it is taken off the wire."""
        fd = -1
        failure: OSError | ValueError | None = None
        try:
            fd = files.create(request["path"], request["mode"])
        except (OSError, ValueError) as error:
            failure = error
        while left:
            part = self.wire.exactly(min(left, CHUNK))
            left -= len(part)
            try:
                if failure is None:
                    files.write_all(fd, part)
            except OSError as error:
                failure = error
        if fd >= 0:
            if failure is not None:
                os.ftruncate(fd, 0)
            os.close(fd)
        if failure is not None:
            raise failure
        self.wire.send({"id": request["id"]})

    def lend(self, number: int, fd: int) -> None:
        """Hand an open file to the host."""
        try:
            self.wire.send({"id": number}, fd)
        finally:
            os.close(fd)

    def tree(self, request: dict[str, Any], pack: int) -> None:
        """Write a folder's files into the memory file that the host lent, one after the other."""
        entries = files.pack_tree(request["path"], pack, request["limit_files"], request["limit_bytes"])
        self.wire.send({"id": request["id"], "entries": entries})

    # --- programs

    def reap(self) -> None:
        """Collect everything that ended; report a program once nothing of it is left alive."""
        while True:
            try:
                pid, status, used = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.execs:
                self.finish(self.execs.pop(pid), status, used.ru_maxrss * 1024)

    def finish(self, done: programs.Exec, status: int, peak_bytes: int) -> None:
        """Report how a program ended, after the rest of it was killed."""
        disk = os.statvfs("/work")
        resisted = self.sweep()
        self.wire.send(
            {
                "id": done.id,
                "status": os.waitstatus_to_exitcode(status),
                "ended_by": done.ended_by,
                "full": disk.f_bavail == 0 or disk.f_favail == 0,
                "resisted": resisted,
                **self.spent().since(done.before),
                "peak_bytes": max(done.peak_bytes, peak_bytes),
                "peak_pids": done.peak_pids,
            }
        )

    def spent(self) -> programs.Spent:
        """Return what everything that was ever collected had used."""
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        read = written = 0
        if self.held.io >= 0:  # the kernel adds a child's counts to its parent's when it is collected
            table = dict(line.split(b": ") for line in os.pread(self.held.io, 512, 0).splitlines())
            read, written = int(table[b"rchar"]), int(table[b"wchar"])
        return programs.Spent(used.ru_utime, used.ru_stime, read, written)

    def sweep(self) -> int:
        """Kill all but what is still open and its descendants; return how many resisted."""
        end = time.monotonic() + SWEEP_S
        while True:
            if self.execs:
                left = set(programs.processes()) - programs.descendants(self.execs) - {1}
                for pid in left:
                    _signal(pid)
                    with contextlib.suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
                if not left:
                    return 0
            else:
                _signal(-1)
                try:
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
                except ChildProcessError:
                    return 0
            if time.monotonic() > end:
                return len(programs.processes())
            time.sleep(NAP_S)

    def kill(self, target: int, *, children_only: bool = False) -> None:
        """End a program, or only what it started."""
        for item in self.execs.values():
            if item.id == target:
                others = set(self.execs) - {item.pid}
                if not others and not children_only:
                    _signal(-1)
                    continue
                spared = {*others, item.pid} if children_only else others
                for pid in programs.descendants({item.pid}) - spared:
                    _signal(pid)

    def look(self) -> None:
        """Where no cgroup limits the box: add up what its programs use, and end what exceeds a limit."""
        limits = self.watch
        if limits is None or time.monotonic() - self.looked < LOOK_S:
            return
        self.looked = time.monotonic()
        load = programs.load()
        for item in self.execs.values():
            item.peak_bytes = max(item.peak_bytes, load.bytes)
            item.peak_pids = max(item.peak_pids, load.threads)
            if load.threads > limits["pids"]:
                reason = "pids"
            elif load.bytes > limits["memory_bytes"] < programs.shared_out():
                reason = "oom"
            elif self.spent().cpu_s + load.cpu_s - item.before.cpu_s > limits["cpu_s"] and not item.shell:
                reason = "cpu"
            else:
                continue
            item.ended_by = item.ended_by or reason
            self.kill(item.id, children_only=item.shell)


def _wake(_number: int, _frame: object) -> None:
    """Make the wake-up descriptor readable; the loop does the rest."""


def _signal(pid: int, number: int = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def serve(birth: Birth) -> script.Script:
    """Run process 1 of a box. Returns only in the forks that are to run a script."""
    return Runner(birth).serve()
