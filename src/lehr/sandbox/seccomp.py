"""The system call filter of a box, built with libseccomp and handed over as a BPF program.

What a program for a task needs is allowed; what widens the kernel's attack surface or reaches outside the
box is refused: mounts, namespaces, tracing, bpf, io_uring, keyrings, modules, clocks, exotic sockets.
Another calling convention than the machine's own (32-bit, x32) ends the program.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import functools
import os
from typing import Any

from lehr.core.errors import MissingDependency

DENIED = """
    mount umount umount2 pivot_root chroot unshare setns open_tree move_mount fsopen fsconfig fsmount fspick
    mount_setattr ptrace process_vm_readv process_vm_writev process_madvise pidfd_getfd kcmp bpf
    perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register keyctl add_key request_key
    open_by_handle_at name_to_handle_at init_module finit_module delete_module kexec_load kexec_file_load
    reboot swapon swapoff acct quotactl quotactl_fd syslog iopl ioperm settimeofday clock_settime
    clock_settime64 clock_adjtime clock_adjtime64 adjtimex stime mbind set_mempolicy move_pages
    migrate_pages uselib vm86 vm86old modify_ldt lookup_dcookie nfsservctl sethostname setdomainname
    fanotify_init vhangup _sysctl sysfs ustat process_mrelease memfd_secret
    sched_setscheduler sched_setattr ioprio_set
"""
"""Refused with EPERM."""

UNCOUNTED = "memfd_create shmget"
"""Memory that no rlimit counts: refused as well where no cgroup limits the box."""

NEWER = {"quotactl_fd": 443, "process_mrelease": 448, "memfd_secret": 447, "mount_setattr": 442}
"""Calls that an older libseccomp has no name for; they have one number on every architecture."""
NUMBERED = (457, 458, 467)
"""statmount, listmount, open_tree_attr."""

NAMESPACE_FLAGS = (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10


def version() -> str:
    """Return libseccomp's version, or raise ``MissingDependency``."""
    _library()

    class Version(ctypes.Structure):
        """``struct scmp_version``."""

        _fields_ = (("major", ctypes.c_uint), ("minor", ctypes.c_uint), ("micro", ctypes.c_uint))

    library = ctypes.CDLL(ctypes.util.find_library("seccomp") or "libseccomp.so.2")
    library.seccomp_version.restype = ctypes.POINTER(Version)
    found = library.seccomp_version().contents
    return f"{found.major}.{found.minor}.{found.micro}"


def _library() -> Any:
    try:
        import pyseccomp  # pyright: ignore[reportMissingTypeStubs]
    except (ImportError, OSError, RuntimeError) as error:
        raise MissingDependency(
            f"cannot load libseccomp: {error}",
            hint="Install it: `apt-get install libseccomp2 && pip install pyseccomp`",
        ) from error
    return pyseccomp


@functools.cache
def program(*, limited: bool = True) -> bytes:
    """Return the filter as BPF instructions, or raise ``MissingDependency`` where libseccomp is absent.

    limited: whether a cgroup counts the box's memory.
    """
    sc = _library()
    refuse, absent = sc.ERRNO(errno.EPERM), sc.ERRNO(errno.ENOSYS)
    rules = sc.SyscallFilter(sc.ALLOW)
    for name in (DENIED if limited else DENIED + UNCOUNTED).split():
        number = _number(name)
        if number is not None:
            rules.add_rule(refuse, number)
    for number in NUMBERED:
        rules.add_rule(refuse, number)
    rules.add_rule(absent, "clone3")
    for flag in NAMESPACE_FLAGS:
        rules.add_rule(refuse, "clone", sc.Arg(0, sc.MASKED_EQ, flag, flag))
    for request in (TIOCSTI, TIOCLINUX):
        rules.add_rule(refuse, "ioctl", sc.Arg(1, sc.MASKED_EQ, 0xFFFFFFFF, request))
    rules.add_rule(refuse, "personality", sc.Arg(0, sc.NE, 0))
    rules.add_rule(refuse, "prlimit64", sc.Arg(0, sc.NE, 0))
    for family in range(AF_INET + 1, AF_INET6):
        rules.add_rule(sc.ERRNO(errno.EAFNOSUPPORT), "socket", sc.Arg(0, sc.EQ, family))
    rules.add_rule(sc.ERRNO(errno.EAFNOSUPPORT), "socket", sc.Arg(0, sc.GT, AF_INET6))
    descriptor = os.memfd_create("filter")
    with os.fdopen(descriptor, "w+b") as handle:
        rules.export_bpf(handle)
        handle.seek(0)
        return handle.read()


def _number(name: str) -> int | str | None:
    sc = _library()
    try:
        number = sc.resolve_syscall(sc.system_arch(), name)
    except (ValueError, OSError):
        number = -1
    if number == -1:
        return NEWER.get(name)
    return name if number >= 0 else None
