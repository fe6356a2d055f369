"""Process 1 of a box whose host can lend it no descriptors: all that goes in or out is a frame on two pipes.

Standard input carries the host's frames, standard output ours. Programs hold pipes of the box's own, which this
process empties and fills, so that nothing of the host's is open in them and the box can be recorded as it runs.
A frame about a stream names the exec and the stream: 0 to 2, and 8 and 9 of a shell as 3 and 4.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import stat
import struct
import time
from typing import Any, NamedTuple

from lehr.sandbox.inside import files, programs, rights, script
from lehr.sandbox.inside.runner import LOOK_S, Runner
from lehr.sandbox.inside.wire import CHUNK, Wire, farewell
from lehr.sandbox.inside.zygote import preload

INPUTS, STATUSES = (0, 3), 4
MOST_CHUNKS = 32
PR_SET_KEEPCAPS = 8
FOREIGN_DEVICES = ("fuse", "net", "tty")


class Pipes(Wire):
    """Frames on standard input and output, without descriptors."""

    def __init__(self) -> None:
        for fd in (0, 1):
            os.set_blocking(fd, True)

    def receive(self) -> tuple[dict[str, Any], list[int], int]:
        """Return the next header, no descriptors, and the length of the payload still to be read."""
        size, payload = struct.unpack("!II", self.exactly(8))
        return json.loads(self.exactly(size)), [], payload

    def exactly(self, count: int) -> bytes:
        """Read ``count`` bytes."""
        parts: list[bytes] = []
        while count:
            part = os.read(0, min(count, CHUNK))
            if not part:
                farewell()
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def send(self, header: dict[str, Any], *fds: int, payload: bytes = b"") -> None:
        """Send one frame."""
        body = json.dumps(header).encode()
        try:
            files.write_all(1, struct.pack("!II", len(body), len(payload)) + body + payload)
        except BrokenPipeError:
            farewell()


class Stream(NamedTuple):
    """One end, held here, of a program's pipe."""

    number: int
    place: int


class Relay(Runner):
    """Serves the host's pipes until they close; then the box ends with it."""

    def __init__(self, pipes: Pipes, config: dict[str, Any], pack: int) -> None:
        self.wire: Wire = pipes
        self.pipes = pipes
        self.apart = True
        self.config = config
        self.pack = pack
        self.held = rights.Held(disk=-1, io=-1, for_host={})
        self.execs: dict[int, programs.Exec] = {}
        self.watch: dict[str, Any] | None = config
        self.looked = 0.0
        self.poll = select.poll()
        self.outputs: dict[int, Stream] = {}
        self.inputs: dict[Stream, int] = {}
        self.unread: dict[Stream, bytes] = {}
        self.idle_bytes = 0

    def serve(self) -> script.Script:
        """Serve. Returns only in forks, with the script that they are to run."""
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.idle_bytes = taken_bytes()
        self.wire.send({"id": 0})
        self.poll.register(0, select.POLLIN)
        self.poll.register(wake, select.POLLIN)
        while True:
            for fd, _ in self.poll.poll(LOOK_S * 1000 if self.execs else None):
                if fd == wake:
                    os.read(wake, 4096)
                elif fd in self.outputs:
                    self.pump(fd)
                elif fd == 0:
                    if (todo := self.handle()) is not None:
                        return todo
                else:
                    self.fill(fd)
            self.reap()
            self.look()

    def handle(self) -> script.Script | None:
        """Serve one request. Returns a script only in the fork that is to run it."""
        request, _, payload = self.wire.receive()
        operation, number = request["op"], request["id"]
        try:
            if operation == "exec":
                return self.begin(request)
            if operation == "feed":
                self.feed(Stream(request["target"], request["stream"]), self.wire.exactly(payload))
            elif operation == "kill":
                self.kill(request["target"], children_only=request["children"])
            elif operation == "write":
                self.write(request, payload)
            elif operation == "open":
                self.hand_over(number, files.open_to_read(request["path"]), request["limit_bytes"])
            elif operation == "tree":
                self.tree(request, self.pack)
            elif operation == "hold":
                self.hold(number)
        except OSError as error:
            self.wire.send({"id": number, "error": error.strerror or str(error), "errno": error.errno})
        except ValueError as error:  # a name that no file can have
            self.wire.send({"id": number, "error": str(error)})
        return None

    def hold(self, number: int) -> None:
        """Do nothing until the host says ``go``: in between the box may be recorded and restored elsewhere.

        In a copy, what ran goes on, but nobody waits for its answer and what it writes is thrown away.
        """
        self.wire.send({"id": number})
        request, _, _ = self.wire.receive()
        if request["copy"]:
            for item in self.execs.values():
                item.id = -abs(item.id)
            self.outputs = {fd: Stream(-abs(s.number), s.place) for fd, s in self.outputs.items()}
            self.inputs = {Stream(-abs(s.number), s.place): fd for s, fd in self.inputs.items()}
            self.unread = {Stream(-abs(s.number), s.place): data for s, data in self.unread.items()}
        self.wire.send({"id": request["id"]})

    # --- files

    def hand_over(self, number: int, fd: int, limit_bytes: int) -> None:
        """Send a regular file's content and what kind of file it is; the host judges both."""
        try:
            info = os.fstat(fd)
            facts = [stat.S_ISREG(info.st_mode), info.st_nlink, info.st_size]
            parts: list[bytes] = []
            room = limit_bytes + 1 if facts[0] and info.st_size <= limit_bytes else 0
            while room and (part := os.read(fd, min(room, CHUNK))):
                parts.append(part)
                room -= len(part)
        finally:
            os.close(fd)
        self.pipes.send({"id": number, "facts": facts}, payload=b"".join(parts))

    def tree(self, request: dict[str, Any], pack: int) -> None:
        """Send a folder's files, one after the other."""
        try:
            entries = files.pack_tree(request["path"], pack, request["limit_files"], request["limit_bytes"])
            size = os.fstat(pack).st_size
            parts: list[bytes] = []
            while size > 0:
                parts.append(os.pread(pack, size, sum(map(len, parts))))
                size -= len(parts[-1])
        finally:
            os.ftruncate(pack, 0)
            os.lseek(pack, 0, os.SEEK_SET)
        self.pipes.send({"id": request["id"], "entries": entries}, payload=b"".join(parts))

    # --- programs

    def begin(self, request: dict[str, Any]) -> script.Script | None:
        """Start a program on pipes of the box's own."""
        if not self.execs:
            self.idle_bytes = taken_bytes()
        ours: dict[Stream, int] = {}
        theirs: list[int] = []
        try:
            for place in range(len(programs.TARGETS) if request.get("shell") else 3):
                if place == 0 and request["no_input"]:
                    theirs.append(os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC))
                    continue
                read, write = os.pipe2(os.O_CLOEXEC)
                if place < 3:
                    with contextlib.suppress(PermissionError):  # gVisor's pipes have no mode and need none
                        os.fchmod(read, 0o666)  # may be opened by name, as in `echo x > /dev/stderr`
                theirs.append(read if place in INPUTS else write)
                ours[Stream(request["id"], place)] = write if place in INPUTS else read
            started = programs.start(request, theirs, self.spent(), apart=self.apart)
        except OSError:
            for fd in ours.values():
                os.close(fd)
            raise
        finally:
            if os.getpid() == 1:
                for fd in theirs:
                    os.close(fd)
        if isinstance(started, script.Script):
            return started._replace(plain_path=self.config["plain_path"], hidden=self.config["hidden"])
        self.execs[started.pid] = started
        for stream, fd in ours.items():
            os.set_blocking(fd, False)
            if stream.place in INPUTS:
                self.inputs[stream] = fd
            else:
                self.outputs[fd] = stream
                self.poll.register(fd, select.POLLIN)
        return None

    def pump(self, fd: int) -> None:
        """Pass on what a program wrote. What a shell's command wrote goes before the command's status."""
        stream = self.outputs[fd]
        if stream.place == STATUSES:
            for other, its in list(self.outputs.items()):
                if its.number == stream.number and its.place != STATUSES:
                    self.drain(other, 2)
        self.drain(fd, 1)

    def drain(self, fd: int, chunks: int) -> None:
        """Pass on up to so many chunks of one pipe."""
        stream = self.outputs[fd]
        for _ in range(chunks):
            try:
                data = os.read(fd, CHUNK)
            except BlockingIOError:
                return
            if stream.number > 0:
                self.pipes.send({"id": stream.number, "stream": stream.place}, payload=data)
            if not data:
                self.poll.unregister(fd)
                del self.outputs[fd]
                os.close(fd)
                return

    def feed(self, stream: Stream, data: bytes) -> None:
        """Take the next piece of an input, or its end if there is none."""
        fd = self.inputs.get(stream)
        if fd is None:
            return
        if data:
            self.unread[stream] = data
            self.fill(fd)
        else:
            self.close_input(stream)

    def fill(self, fd: int) -> None:
        """Write what a program's pipe takes; ask for more when nothing is left."""
        stream = next((s for s, its in self.inputs.items() if its == fd), None)
        if stream is None:
            return
        data = self.unread.get(stream, b"")
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            pass
        except OSError:
            self.close_input(stream)
            return
        if data:
            self.unread[stream] = data
            self.poll.register(fd, select.POLLOUT)
            return
        self.unread.pop(stream, None)
        with contextlib.suppress(KeyError):
            self.poll.unregister(fd)
        if stream.number > 0:
            self.wire.send({"id": stream.number, "stream": stream.place, "took": True})

    def close_input(self, stream: Stream) -> None:
        """Let the program read the end of its input."""
        fd = self.inputs.pop(stream)
        self.unread.pop(stream, None)
        with contextlib.suppress(KeyError):
            self.poll.unregister(fd)
        os.close(fd)

    def finish(self, done: programs.Exec, status: int, peak_bytes: int) -> None:
        """Report how a program ended, after the rest of it was killed and all that it wrote was passed on."""
        full = self.full()
        resisted = self.sweep()
        for stream in [stream for stream in self.inputs if stream.number == done.id]:
            self.close_input(stream)
        for fd, stream in list(self.outputs.items()):
            if stream.number == done.id:
                self.drain(fd, MOST_CHUNKS)
                if fd in self.outputs:
                    self.poll.unregister(fd)
                    del self.outputs[fd]
                    os.close(fd)
        if done.id > 0:
            self.wire.send(
                {
                    "id": done.id,
                    "status": os.waitstatus_to_exitcode(status),
                    "ended_by": done.ended_by,
                    "full": full,
                    "resisted": resisted,
                    **self.spent().since(done.before),
                    "peak_bytes": max(done.peak_bytes, peak_bytes),
                    "peak_pids": done.peak_pids,
                }
            )

    def full(self) -> bool:
        """Whether nothing more can be written; what a program held is freed with it."""
        return os.statvfs("/work").f_bavail == 0

    def look(self) -> None:
        """Add up what programs use, and end what exceeds a limit: the host's own limits end the whole box."""
        if not self.execs or time.monotonic() - self.looked < LOOK_S:
            return
        self.looked = time.monotonic()
        load, taken = programs.load(), taken_bytes() - self.idle_bytes
        for item in self.execs.values():
            item.peak_bytes = max(item.peak_bytes, taken)
            item.peak_pids = max(item.peak_pids, load.threads)
            if load.threads > self.config["pids"]:
                reason = "pids"
            elif taken > self.config["memory_bytes"]:
                reason = "oom"
            elif self.exhausted(item, load.cpu_s):
                reason = "cpu"
            else:
                continue
            item.ended_by = item.ended_by or reason
            self.kill(item.id, children_only=item.shell)

    def exhausted(self, item: programs.Exec, running_s: float) -> bool:
        """Where no cgroup of the host counts: whether a program used up its CPU time, as gVisor counts."""
        limit_s = self.config["cpu_s"]
        used_s = self.spent().cpu_s - item.before.cpu_s + running_s
        return limit_s is not None and not item.shell and used_s > limit_s


def taken_bytes() -> int:
    """Return the bytes of all programs and of the box's disk; pages of the system's files do not count."""
    total = 0
    with open("/proc/meminfo", "rb") as handle:
        for line in handle:
            if line.startswith((b"AnonPages:", b"Shmem:")):
                total += int(line.split()[1]) << 10
    return total


def set_up(config: dict[str, Any]) -> None:
    """Lay out the box's own disk, become the runner's user, and give up all rights but those over programs."""
    os.umask(0)
    for name in FOREIGN_DEVICES:
        shutil.rmtree(f"/dev/{name}", ignore_errors=True)
        with contextlib.suppress(OSError):
            os.unlink(f"/dev/{name}")
    size = f"size={config['disk_bytes']},mode=0755"
    rights.mount("box", "/tmp", "tmpfs", rights.MS_NOSUID | rights.MS_NODEV, size)
    for name, mode, target in (("work", 0o755, "/work"), ("shm", 0o1777, "/dev/shm"), ("tmp", 0o1777, "/tmp")):
        os.mkdir("/tmp/" + name, mode)
        os.chown("/tmp/" + name, rights.CANDIDATE, rights.CANDIDATE)
        rights.mount("/tmp/" + name, target, "", rights.MS_BIND)
    os.umask(0o022)
    os.chdir("/work")
    drop(bytes.fromhex(config["filter"]))


def drop(program: bytes) -> None:
    """Keep what it takes to start programs as another user and to end them; files are the candidate's."""
    rights.check(rights.LIBC.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "keep capabilities")
    for number in range(64):
        if rights.LIBC.prctl(rights.PR_CAPBSET_DROP, number, 0, 0, 0) != 0:
            break
    os.setgroups([])
    os.setresgid(rights.RUNNER, rights.CANDIDATE, rights.RUNNER)
    os.setresuid(rights.RUNNER, rights.CANDIDATE, rights.RUNNER)
    rights.keep_only(rights.KILL, rights.SETGID, rights.SETUID)
    rights.check(rights.LIBC.prctl(rights.PR_SET_DUMPABLE, 0, 0, 0, 0), "become undumpable")
    rights.check(rights.LIBC.prctl(rights.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "set no_new_privs")
    rights.install(program)


def serve() -> script.Script:
    """Load what scripts use, say so, and become a box once the host says which. Returns only in forks."""
    pipes = Pipes()
    pack = os.memfd_create("tree", os.MFD_CLOEXEC)  # the filter refuses memory files to this process too
    preload()
    pipes.send({"id": 0})
    config, _, _ = pipes.receive()
    try:
        set_up(config)
    except OSError as error:
        pipes.send({"id": 0, "error": str(error)})
        farewell()
    return Relay(pipes, config, pack).serve()
