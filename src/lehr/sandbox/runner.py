"""Process 1 of a box: starts programs, reports how they ended, reads and writes files.

Runs inside the box under the system's own python3 with nothing but the standard library; the host sends
this source over the control socket and never imports it. It finishes the set-up that needs rights inside
the box's namespaces (one size- and inode-limited file system behind /work, /tmp and /dev/shm), gives every
right up, installs the system call filter on itself and then only serves requests. Programs run as its
children without the control socket, cannot trace it (filter, not dumpable) and cannot signal it (it is
process 1 of their namespace).

A frame is ``!II`` (lengths of header and payload), a JSON header, a payload. Descriptors ride on the
first byte of a frame.
"""

from __future__ import annotations

import array
import ctypes
import errno
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import time
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
MS_NOSUID, MS_NODEV, MS_RDONLY, MS_REMOUNT, MS_BIND = 2, 4, 1, 32, 4096
MNT_DETACH = 2
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 4, 22, 24, 38, 47
OPEN_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
DEPTH = 128
SWEEP_S = 1.0


def check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, "%s: %s" % (what, os.strerror(code)))


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    args = (source.encode(), target.encode(), kind.encode(), flags, data.encode())
    check(LIBC.mount(*args[:3], ctypes.c_ulong(flags), args[4]), "mount " + target)


def set_up(config: dict[str, Any]) -> None:
    """Mount the box's one writable file system, then give up every right."""
    os.umask(0)
    flags = MS_NOSUID | MS_NODEV
    size = "size=%d,nr_inodes=%d,mode=0755" % (config["disk_bytes"], config["inodes"] + 4)
    mount("box", "/tmp", "tmpfs", flags, size)
    for name, mode, target in (("work", 0o755, "/work"), ("shm", 0o1777, "/dev/shm"), ("tmp", 0o1777, "/tmp")):
        os.mkdir("/tmp/" + name, mode)
        mount("/tmp/" + name, target, "", MS_BIND)
    LIBC.umount2(b"/proc/sys", MNT_DETACH)
    with open("/proc/sys/user/max_user_namespaces", "w") as handle:
        handle.write("0")
    mount("/proc/sys", "/proc/sys", "", MS_BIND)
    mount("/proc/sys", "/proc/sys", "", MS_BIND | MS_REMOUNT | MS_RDONLY | flags)
    os.umask(0o022)
    os.chdir("/work")
    drop_rights(bytes.fromhex(config["filter"]))


def drop_rights(program: bytes) -> None:
    check(LIBC.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0), "clear ambient capabilities")
    capability = 0
    while LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    header = struct.pack("Ii", 0x20080522, 0)
    check(LIBC.capset(header, bytes(24)), "drop capabilities")
    check(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "become undumpable")
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "set no_new_privs")
    code = ctypes.create_string_buffer(program, len(program))
    prog = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    check(LIBC.prctl(PR_SET_SECCOMP, 2, prog, 0, 0), "install the system call filter")


class Exec:
    """A program that was started and has not been reported yet."""

    def __init__(self, request: dict[str, Any], pid: int, cpu_s: float) -> None:
        self.id: int = request["id"]
        self.pid = pid
        self.shell: bool = request.get("shell", False)
        self.cpu_before_s = cpu_s
        self.peak_bytes = 0
        self.peak_pids = 0
        self.ended_by = ""


class Runner:
    """Serves the control socket until it closes; then the box ends with it."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.execs: dict[int, Exec] = {}
        self.watch: dict[str, Any] | None = None
        self.limits: dict[str, Any] = {}

    def serve(self) -> None:
        config, fds, _ = self.receive()
        self.limits = config
        if config["watch"]:
            self.watch = config
        try:
            set_up(config)
        except OSError as error:
            self.send({"id": 0, "error": str(error), "errno": error.errno})
            return
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        wake, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
        self.send({"id": 0})
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(wake, select.POLLIN)
        while True:
            busy = self.watch is not None and self.execs
            ready = poll.poll(20 if busy else None)
            for fd, _event in ready:
                if fd == wake:
                    os.read(wake, 4096)
                else:
                    self.handle()
            self.reap()
            if busy and self.watch:
                self.look(self.watch)

    # --- the wire

    def receive(self) -> tuple[dict[str, Any], list[int], int]:
        """Return the next header, its descriptors and the length of the payload still to be read."""
        head, fds, _flags, _address = socket.recv_fds(self.control, 8, 8)
        if not head:
            os._exit(0)
        head += self.exactly(8 - len(head))
        size, payload = struct.unpack("!II", head)
        for fd in fds:
            os.set_inheritable(fd, False)
        return json.loads(self.exactly(size)), list(fds), payload

    def exactly(self, count: int) -> bytes:
        parts: list[bytes] = []
        while count:
            part = self.control.recv(min(count, 1 << 16))
            if not part:
                os._exit(0)
            parts.append(part)
            count -= len(part)
        return b"".join(parts)

    def send(self, header: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        body = json.dumps({**header, "fds": len(fds)}).encode("utf-8", "surrogateescape")
        head = struct.pack("!II", len(body), 0)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self.control.sendmsg([head, body], rights)
        rest = (head + body)[sent:]
        if rest:
            self.control.sendall(rest)

    def handle(self) -> None:
        request, fds, payload = self.receive()
        operation = request["op"]
        try:
            if operation == "exec":
                self.start(request, fds)
            elif operation == "kill":
                self.kill(request)
            elif operation == "write":
                self.write(request, payload)
            elif operation == "open":
                self.lend(request)
            elif operation == "tree":
                self.tree(request)
        except OSError as error:
            self.send({"id": request["id"], "error": error.strerror or str(error), "errno": error.errno})
        finally:
            for fd in fds:
                os.close(fd)

    # --- programs

    def start(self, request: dict[str, Any], fds: list[int]) -> None:
        told, tell = os.pipe2(os.O_CLOEXEC)
        cpu_s = self.spent_s()
        try:
            pid = os.fork()
        except OSError:
            os.close(told)
            os.close(tell)
            raise
        if pid == 0:
            try:
                self.become(request, fds, tell)
            except OSError as error:
                os.write(3, struct.pack("!i", error.errno or errno.EIO))
            finally:
                os._exit(127)
        os.close(tell)
        self.execs[pid] = Exec(request, pid, cpu_s)
        report = os.read(told, 4)
        os.close(told)
        if report:
            self.execs[pid].ended_by = "start:%d" % struct.unpack("!i", report)[0]

    def become(self, request: dict[str, Any], fds: list[int], tell: int) -> None:
        """Turn this fork into the program. Descriptor 3 tells the runner why that failed."""
        os.setsid()
        high = [os.dup(fd) if fd < 16 else fd for fd in [*fds, tell]]
        high = [fd if fd >= 16 else dup_above(fd) for fd in high]
        targets = [0, 1, 2, 8, 9][: len(fds)]
        for source, target in zip(high, targets):
            os.dup2(source, target, inheritable=True)
        os.dup2(high[-1], 3, inheritable=False)
        for low, end in ((4, 8), (10, 1 << 16)) if len(fds) > 3 else ((4, 1 << 16),):
            os.closerange(low, end)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for name, (soft, hard) in request["rlimits"].items():
            resource.setrlimit(getattr(resource, "RLIMIT_" + name), (soft, hard))
        os.umask(0o022)
        os.chdir(os.path.join("/work", request["cwd"]))
        check(LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "become dumpable")
        with open("/proc/self/oom_score_adj", "w") as handle:
            handle.write("1000")
        os.execvpe(request["argv"][0], request["argv"], request["env"])

    def spent_s(self) -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

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

    def finish(self, done: Exec, status: int, peak_bytes: int) -> None:
        disk = os.statvfs("/work")
        full = disk.f_bavail == 0 or disk.f_favail == 0
        alive = self.sweep()
        self.send(
            {
                "id": done.id,
                "status": os.waitstatus_to_exitcode(status),
                "ended_by": done.ended_by,
                "full": full,
                "alive": alive,
                "cpu_s": self.spent_s() - done.cpu_before_s,
                "peak_bytes": max(done.peak_bytes, peak_bytes),
                "peak_pids": max(done.peak_pids, 1),
            }
        )

    def sweep(self) -> int:
        """Kill all that is left but open shells and what they started; return how many resisted."""
        if not self.execs:
            end = time.monotonic() + SWEEP_S
            while True:
                try:
                    os.kill(-1, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                try:
                    while os.waitpid(-1, os.WNOHANG)[0]:
                        pass
                except ChildProcessError:
                    return 0
                if time.monotonic() > end:
                    return len(processes()) - 1
                time.sleep(0.0005)
        end = time.monotonic() + SWEEP_S
        while True:
            left = [pid for pid in processes() if pid not in self.spared() and pid != 1]
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                try:
                    os.waitpid(pid, os.WNOHANG)
                except ChildProcessError:
                    pass
            if not left or time.monotonic() > end:
                return len(left)
            time.sleep(0.0005)

    def spared(self) -> set[int]:
        """Open programs and all their descendants."""
        parents = {pid: parent for pid, parent in ((p, parent_of(p)) for p in processes())}
        kept = set(self.execs)
        grown = True
        while grown:
            more = {pid for pid, parent in parents.items() if parent in kept} - kept
            kept |= more
            grown = bool(more)
        return kept

    def kill(self, request: dict[str, Any]) -> None:
        """End a program (or, with ``children``, only what it started)."""
        for item in list(self.execs.values()):
            if item.id != request["target"]:
                continue
            keep = {item.pid} if request.get("children") else set()
            others = set(self.execs) - {item.pid}
            if not others and not keep:
                os.kill(-1, signal.SIGKILL)
                return
            for pid in self.below(item.pid) - others - keep:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass

    def below(self, root: int) -> set[int]:
        parents = {pid: parent_of(pid) for pid in processes()}
        kept = {root}
        grown = True
        while grown:
            more = {pid for pid, parent in parents.items() if parent in kept} - kept
            kept |= more
            grown = bool(more)
        return kept

    def look(self, limits: dict[str, Any]) -> None:
        """Where no cgroup limits the box: add up memory, processes and CPU time, and end what exceeds."""
        pids, total, live_s = 0, 0, 0.0
        tick, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
        for pid in processes():
            if pid == 1:
                continue
            try:
                with open("/proc/%d/stat" % pid) as handle:
                    fields = handle.read().rpartition(")")[2].split()
            except OSError:
                continue
            pids += int(fields[17])
            live_s += sum(map(int, fields[11:15])) / tick
            total += int(fields[21]) * page
        for item in self.execs.values():
            item.peak_bytes = max(item.peak_bytes, total)
            item.peak_pids = max(item.peak_pids, pids)
            if item.shell or item.ended_by:
                continue
            if total > limits["memory_bytes"]:
                item.ended_by = "oom"
            elif self.spent_s() + live_s - item.cpu_before_s > limits["cpu_s"]:
                item.ended_by = "cpu"
            if item.ended_by:
                self.kill({"target": item.id})

    # --- files

    def folder(self, path: str, create: bool = False) -> tuple[int, str]:
        """Open the parent of ``path`` following no link; return it and the last name."""
        parts = [part for part in os.path.normpath(os.path.join("/work", path)).split("/") if part]
        if len(parts) > DEPTH:
            raise OSError(errno.ENAMETOOLONG, "deeper than %d folders" % DEPTH)
        here = os.open("/", OPEN_DIR)
        for part in parts[:-1]:
            try:
                if create:
                    try:
                        os.mkdir(part, 0o755, dir_fd=here)
                    except OSError as error:
                        if error.errno not in (errno.EEXIST, errno.EROFS, errno.EACCES):
                            raise
                there = os.open(part, OPEN_DIR, dir_fd=here)
            finally:
                os.close(here)
            here = there
        return here, parts[-1] if parts else "."

    def write(self, request: dict[str, Any], payload: int) -> None:
        fd, left = -1, payload
        try:
            parent, name = self.folder(request["path"], create=True)
            try:
                fd = os.open(name, os.O_WRONLY | os.O_CREAT | OPEN_FILE, request["mode"], dir_fd=parent)
            finally:
                os.close(parent)
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
                raise OSError(errno.EPERM, "not a regular file of its own")
            os.ftruncate(fd, 0)
            os.fchmod(fd, request["mode"])
            while left:
                part = self.control.recv(min(left, 1 << 16))
                if not part:
                    os._exit(0)
                left -= len(part)
                while part:
                    part = part[os.write(fd, part) :]
        finally:
            self.exactly(left)
            if fd >= 0:
                os.close(fd)
        self.send({"id": request["id"]})

    def lend(self, request: dict[str, Any]) -> None:
        """Hand an open file to the host, which judges it by the descriptor."""
        parent, name = self.folder(request["path"])
        try:
            fd = os.open(name, os.O_RDONLY | OPEN_FILE, dir_fd=parent)
        finally:
            os.close(parent)
        try:
            self.send({"id": request["id"]}, (fd,))
        finally:
            os.close(fd)

    def tree(self, request: dict[str, Any]) -> None:
        """Pack a folder into one memory file: what is neither a file nor a folder is left out."""
        pack = os.memfd_create("tree", os.MFD_CLOEXEC)
        try:
            entries: list[tuple[str, int]] = []
            room: int = request["limit_bytes"]
            todo = [""]
            while todo:
                inner = todo.pop()
                parent, name = self.folder(os.path.join(request["path"], inner, "."))
                here = os.open(name, OPEN_DIR, dir_fd=parent)
                os.close(parent)
                try:
                    for item in sorted(os.listdir(here)):
                        path = os.path.join(inner, item)
                        size = self.pack(here, item, pack, room)
                        if size is None:
                            continue
                        entries.append((path, size))
                        if size < 0:
                            todo.append(path)
                        else:
                            room -= size
                        if len(entries) > request["limit_files"]:
                            raise OSError(errno.E2BIG, "more than %d files" % request["limit_files"])
                finally:
                    os.close(here)
            self.send({"id": request["id"], "entries": entries}, (pack,))
        finally:
            os.close(pack)

    def pack(self, here: int, name: str, pack: int, room: int) -> int | None:
        """Append one file; return its size, -1 for a folder, None for anything else."""
        try:
            info = os.stat(name, dir_fd=here, follow_symlinks=False)
            if stat.S_ISDIR(info.st_mode):
                return -1
            if not stat.S_ISREG(info.st_mode):
                return None
            fd = os.open(name, os.O_RDONLY | OPEN_FILE, dir_fd=here)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.ELOOP, errno.ENOENT):
                return None
            raise
        size = 0
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            while True:
                part = os.read(fd, 1 << 16)
                if not part:
                    return size
                size += len(part)
                if size > room:
                    raise OSError(errno.EFBIG, "more than the allowed bytes in all")
                while part:
                    part = part[os.write(pack, part) :]
        finally:
            os.close(fd)


def dup_above(fd: int) -> int:
    import fcntl

    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 16)


def processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def parent_of(pid: int) -> int:
    try:
        with open("/proc/%d/stat" % pid) as handle:
            return int(handle.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


Runner(socket.socket(fileno=CONTROL)).serve()  # type: ignore[name-defined]  # noqa: F821
