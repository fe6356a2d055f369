"""The one moment in which a box's process 1 has rights: mount what is writable, then give them up."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT, MS_BIND = 1, 2, 4, 32, 4096
MNT_DETACH = 2
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 4, 22, 24, 38, 47
OWN_INODES = 4


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


def set_up(config: dict[str, Any]) -> None:
    """Put one size- and inode-limited file system behind /work, /tmp and /dev/shm; then drop all rights."""
    os.umask(0)
    flags = MS_NOSUID | MS_NODEV
    size = f"size={config['disk_bytes']},nr_inodes={config['inodes'] + OWN_INODES},mode=0755"
    mount("box", "/tmp", "tmpfs", flags, size)
    for name, mode, target in (("work", 0o755, "/work"), ("shm", 0o1777, "/dev/shm"), ("tmp", 0o1777, "/tmp")):
        os.mkdir("/tmp/" + name, mode)
        mount("/tmp/" + name, target, "", MS_BIND)
    forbid_namespaces()
    os.umask(0o022)
    os.chdir("/work")
    drop(bytes.fromhex(config["filter"]))


def forbid_namespaces() -> None:
    """Allow no user namespace below this one, a second line behind the filter."""
    if LIBC.umount2(b"/proc/sys", MNT_DETACH) != 0 and ctypes.get_errno() != errno.EINVAL:
        check(-1, "uncover /proc/sys")  # EINVAL: bubblewrap did not cover it
    with open("/proc/sys/user/max_user_namespaces", "w") as handle:
        handle.write("0")
    mount("/proc/sys", "/proc/sys", "", MS_BIND)
    mount("/proc/sys", "/proc/sys", "", MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def drop(program: bytes) -> None:
    """Give up every capability for good, become untraceable and install the filter."""
    check(LIBC.prctl(PR_CAP_AMBIENT, 4, 0, 0, 0), "clear ambient capabilities")
    capability = 0
    while LIBC.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1
    check(LIBC.capset(struct.pack("Ii", 0x20080522, 0), bytes(24)), "drop capabilities")
    check(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "become undumpable")
    check(LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "set no_new_privs")
    code = ctypes.create_string_buffer(program, len(program))
    filters = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))
    check(LIBC.prctl(PR_SET_SECCOMP, 2, filters, 0, 0), "install the system call filter")


def become_dumpable() -> None:
    """Undo, in a fork that holds nothing, what keeps ``/proc/self`` of process 1 closed."""
    check(LIBC.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0), "become dumpable")
