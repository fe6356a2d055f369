"""The moments in which a box has rights: it enters its namespaces, completes them, and gives all rights up."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from lehr.sandbox.inside.zygote import Birth

LIBC = ctypes.CDLL(None, use_errno=True)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MNT_DETACH = 2
NEW_TIME, NEW_MOUNTS, NEW_CGROUPS, NEW_NAME, NEW_IPC = 0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000
NEW_USERS, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 4, 22, 24, 38, 47
KILL, SETGID, SETUID = 5, 6, 7
RUNNER, CANDIDATE = 999, 1000
OWN_INODES, OVERLAY_INODES = 4, 6
MOST_FDS = 1 << 16
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1
PROXY = ("127.0.0.1", 3128)
SECCOMP_SET_FILTER, SECCOMP_NEW_LISTENER = 1, 8
SECCOMP = {"x86_64": 317, "aarch64": 277}
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446
MAKE_CHAR, MAKE_BLOCK = 1 << 6, 1 << 11
WRITING = 1 << 1 | 1 << 14 | 1 << 15
"""Landlock: WRITE_FILE, TRUNCATE, IOCTL_DEV."""
CHANGING = 0xFFF2
"""Landlock: every right over files but EXECUTE, READ_FILE and READ_DIR."""
LATER = {13: 2, 14: 3, 15: 5}
"""Rights by the version of Landlock that added them: REFER, TRUNCATE, IOCTL_DEV."""
SCOPES = 3
"""Landlock: no abstract socket and no signal reaches outside."""
READ_ONLY_PROC = ("sys", "bus", "fs", "irq", "sysrq-trigger")


def check(result: int, what: str) -> None:
    """Raise the ``OSError`` of a failed C call."""
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Attach a file system, or raise ``OSError``."""
    result = LIBC.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode() or None
    )
    check(result, f"mount {target}")


def close_all_but(keep: Collection[int]) -> None:
    """Close every descriptor that is not listed."""
    low = 0
    for fd in sorted(keep):
        if low < fd:  # an empty range would be read as everything
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, MOST_FDS)


# --- the zygote


def become_zygote(config: dict[str, Any]) -> None:
    """Take the image's first user, and uncover the kernel settings that bubblewrap covered."""
    first = config["user"]
    os.setresgid(first, first, first)
    os.setresuid(first, first, first)
    for name in READ_ONLY_PROC:
        failed = LIBC.umount2(f"/proc/{name}".encode(), MNT_DETACH) != 0
        if failed and ctypes.get_errno() not in (errno.EINVAL, errno.ENOENT):  # not covered, or not there
            check(-1, f"uncover /proc/{name}")


def fork_into_new_pids(own: int) -> int:
    """Fork a process that is number 1 of a new namespace. own: this process's namespace, to fork into later."""
    check(LIBC.unshare(NEW_PIDS), "make a process namespace")
    pid = -1
    try:
        pid = os.fork()
    finally:
        if pid != 0:
            check(LIBC.setns(own, NEW_PIDS), "go back to the own process namespace")
    return pid


# --- a box


class Held(NamedTuple):
    """What process 1 has open from the time when it had rights: its disk's folder, and ``/proc/self/io``.

    for_host: what it gives to the host, by name.
    """

    disk: int
    io: int
    for_host: dict[str, int]


def set_up(birth: Birth) -> Held:
    """Make the fork a box of its own: groups, namespaces, mounts, users; then drop all rights."""
    config = birth.config
    for door in birth.doors:
        os.write(door, b"0")
        os.close(door)
    os.setsid()
    os.umask(0)
    proc = os.open("/proc", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)  # the zygote's: nothing in it is covered
    new = NEW_MOUNTS | NEW_IPC | NEW_NAME | NEW_NETWORK
    check(LIBC.unshare(new), "make namespaces")
    for extra in (NEW_CGROUPS, NEW_TIME):
        if LIBC.unshare(extra) != 0 and ctypes.get_errno() != errno.EINVAL:
            check(-1, "make namespaces")  # EINVAL: a kernel without them
    check(LIBC.sethostname(b"box", 3), "set the host name")
    raise_loopback()
    for_host = {"proxy": listen()} if config["proxy"] else {}
    disk = lay_out(config)
    counted = os.open("/proc/self/io", os.O_RDONLY | os.O_CLOEXEC) if os.path.exists("/proc/self/io") else -1
    os.umask(0o022)
    os.chdir("/work")
    check(LIBC.unshare(NEW_USERS), "make a user namespace")
    birth.ask_for_maps()
    os.close(birth.asks)
    os.close(birth.mapped)
    own = RUNNER if config["apart"] else CANDIDATE
    os.setresgid(own, own, own)
    os.setresuid(own, own, own)
    forbid_namespaces(proc)
    os.close(proc)
    *filters, asking = config["filters"][config["watch"]]
    notices = drop(filters, apart=config["apart"], asking=asking)
    if notices >= 0:
        for_host["notices"] = notices
    return Held(disk, counted, for_host)


def raise_loopback() -> None:
    """Bring the box's own loopback up."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", IFF_UP)
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, request)


def listen() -> int:
    """Return a socket on which the host will take the box's connections to the proxy."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(PROXY)
        listener.listen(64)
        return listener.detach()


def lay_out(config: dict[str, Any]) -> int:
    """Mount the box's own /proc, and one size- and inode-limited disk behind /work, /tmp and /dev/shm.

    Returns the disk's folder. With layers, the disk holds what differs from them.
    """
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for name in config["masked"]:
        path = f"/proc/{name}"
        if os.path.exists(path):
            mount("/dev/null", path, "", MS_BIND)
    for name in READ_ONLY_PROC:
        path = f"/proc/{name}"
        if os.path.exists(path):
            mount(path, path, "", MS_BIND)
            mount(path, path, "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV | MS_NOEXEC)
    owner, below = config["candidate"], config["layers"]
    inodes = config["inodes"] + OWN_INODES + (OVERLAY_INODES if below else 0)
    size = f"size={config['disk_bytes']},nr_inodes={inodes},mode=0755"
    mount("box", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, size)
    disk = os.open("/tmp", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    for name, mode, target in (("work", 0o755, "/work"), ("shm", 0o1777, "/dev/shm"), ("tmp", 0o1777, "/tmp")):
        upper = "/tmp/" + name
        if below:
            mode = os.stat(f"/run/{below[-1]}/{name}").st_mode & 0o7777
        os.mkdir(upper, mode)
        os.chown(upper, owner, owner)
        if below:
            os.mkdir(f"/tmp/.{name}", 0o700)
            lower = ":".join(f"/run/{number}/{name}" for number in reversed(below))
            places = f"lowerdir={lower},upperdir={upper},workdir=/tmp/.{name},userxattr"
            mount("box", target, "overlay", MS_NOSUID | MS_NODEV, places)
        else:
            mount(upper, target, "", MS_BIND)
    check(LIBC.umount2(b"/run", MNT_DETACH), "take the layers away")
    return disk


def forbid_namespaces(proc: int) -> None:
    """Allow no user namespace below this one, a second line behind the filter."""
    fd = os.open("sys/user/max_user_namespaces", os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
    os.write(fd, b"0")
    os.close(fd)


def drop(filters: list[str], *, apart: bool, asking: str = "") -> int:
    """Give up every capability for good, become untraceable, and install Landlock rules and filters.

    apart: keep what it takes to start programs as another user and to end them; nothing inherits it.
    asking: stands for the last filter where the kernel can ask the host about what it refuses. Returns the
    descriptor on which it asks, or -1.
    """
    check(LIBC.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0), "clear ambient capabilities")
    capability = 0
    while LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    keep_only(*((KILL, SETGID, SETUID) if apart else ()))
    check(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "become undumpable")
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "set no_new_privs")
    restrict_files()
    notices = install_asking(bytes.fromhex(asking)) if asking else -1
    for text in filters if notices < 0 else filters[:-1]:
        install(bytes.fromhex(text))
    if apart:  # files are the candidate's, whoever makes them
        LIBC.setfsgid(CANDIDATE)
        LIBC.setfsuid(CANDIDATE)
    return notices


def install(program: bytes) -> None:
    """Install a system call filter on this process and all that it starts."""
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    check(LIBC.prctl(PR_SET_SECCOMP, 2, header, 0, 0), "install the system call filter")


def install_asking(program: bytes) -> int:
    """Install a filter that asks about what it refuses. Returns where it asks, or -1 if the kernel cannot."""
    number = SECCOMP.get(os.uname().machine)
    if number is None:
        return -1
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    flags = ctypes.c_ulong(SECCOMP_NEW_LISTENER)
    return int(LIBC.syscall(number, ctypes.c_ulong(SECCOMP_SET_FILTER), flags, header))


def restrict_files() -> None:
    """Landlock, a second line behind the read-only mounts: nothing is changed outside the box's own disk.

    A kernel without Landlock leaves it at the first line; what a later version adds is used where it is.
    """
    abi = LIBC.syscall(LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    if abi <= 0:
        return
    changing = CHANGING & ~sum(1 << bit for bit, since in LATER.items() if abi < since)
    scoped = SCOPES if abi >= 6 else 0
    attributes = struct.pack("QQQ", changing, 0, scoped)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    rules = LIBC.syscall(LANDLOCK_CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), 0)
    check(min(rules, 0), "make Landlock rules")
    own = changing & ~(MAKE_CHAR | MAKE_BLOCK)
    for path, allowed in (("/work", own), ("/tmp", own), ("/dev", own), ("/proc", changing & WRITING)):
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed, folder)
        check(LIBC.syscall(LANDLOCK_ADD_RULE, rules, 1, rule, 0), f"allow changes below {path}")
        os.close(folder)
    check(LIBC.syscall(LANDLOCK_RESTRICT_SELF, rules, 0), "install Landlock rules")
    os.close(rules)


def keep_only(*capabilities: int) -> None:
    """Drop all capabilities but these."""
    mask = sum(1 << number for number in capabilities)
    check(LIBC.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", mask, mask, 0, 0, 0, 0)), "capset")


# --- a program


def become_candidate(*, apart: bool) -> None:
    """In a fork that holds nothing: take the candidate's user without any right, and be an open book again."""
    if apart:
        os.setresgid(CANDIDATE, CANDIDATE, CANDIDATE)
        os.setresuid(CANDIDATE, CANDIDATE, CANDIDATE)
    keep_only()
    check(LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "become dumpable")
