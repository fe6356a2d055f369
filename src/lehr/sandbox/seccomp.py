"""The system call filters of a box, built with libseccomp and handed over as BPF programs.

The first is an allow-list: a call that it does not name does not exist (ENOSYS), so that what a later kernel
adds is absent until it is looked at here. The second refuses (EPERM), among the calls that programs know to
exist, what widens the kernel's attack surface or reaches outside the box: mounts, namespaces, tracing, bpf,
io_uring, keyrings, modules, clocks, exotic sockets. Another calling convention than the machine's own (32-bit,
x32) ends the program.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import errno
import functools
import os
import stat
from typing import Any

from lehr.core.errors import MissingDependency

ALLOWED = """
    _llseek _newselect accept accept4 access alarm arch_prctl arm_fadvise64_64 arm_sync_file_range bind brk
    cacheflush cachestat capget capset chdir chmod chown chown32 clock_getres clock_getres_time64 clock_gettime
    clock_gettime64 clock_nanosleep clock_nanosleep_time64 clone close close_range connect copy_file_range creat
    dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_ctl_old epoll_pwait epoll_pwait2 epoll_wait
    epoll_wait_old eventfd eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fadvise64_64
    fallocate fchdir fchmod fchmodat fchmodat2 fchown fchown32 fchownat fcntl fcntl64 fdatasync fgetxattr
    flistxattr flock fork fremovexattr fsetxattr fstat fstat64 fstatat64 fstatfs fstatfs64 fsync ftruncate
    ftruncate64 futex futex_requeue futex_time64 futex_wait futex_waitv futex_wake futimesat get_mempolicy
    get_robust_list get_thread_area getcpu getcwd getdents getdents64 getegid getegid32 geteuid geteuid32 getgid
    getgid32 getgroups getgroups32 getitimer getpeername getpgid getpgrp getpid getppid getpriority getrandom
    getresgid getresgid32 getresuid getresuid32 getrlimit getrusage getsid getsockname getsockopt gettid
    gettimeofday getuid getuid32 getxattr inotify_add_watch inotify_init inotify_init1 inotify_rm_watch
    io_cancel io_destroy io_getevents io_pgetevents io_pgetevents_time64 io_setup io_submit ioctl ioprio_get ipc
    kill landlock_add_rule landlock_create_ruleset landlock_restrict_self lchown lchown32 lgetxattr link linkat
    listen listxattr llistxattr lremovexattr lseek lsetxattr lstat lstat64 madvise map_shadow_stack membarrier
    memfd_create mincore mkdir mkdirat mknod mknodat mlock mlock2 mlockall mmap mmap2 mprotect mq_getsetattr
    mq_notify mq_open mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 mq_unlink mremap
    mseal msgctl msgget msgrcv msgsnd msync munlock munlockall munmap nanosleep newfstatat open openat openat2
    pause personality pidfd_open pidfd_send_signal pipe pipe2 pkey_alloc pkey_free pkey_mprotect poll ppoll
    ppoll_time64 prctl pread64 preadv preadv2 prlimit64 pselect6 pselect6_time64 pwrite64 pwritev pwritev2 read
    readahead readlink readlinkat readv recv recvfrom recvmmsg recvmmsg_time64 recvmsg remap_file_pages
    removexattr rename renameat renameat2 restart_syscall riscv_flush_icache riscv_hwprobe rmdir rseq
    rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo rt_sigreturn rt_sigsuspend rt_sigtimedwait
    rt_sigtimedwait_time64 rt_tgsigqueueinfo sched_get_priority_max sched_get_priority_min sched_getaffinity
    sched_getattr sched_getparam sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64
    sched_setaffinity sched_setparam sched_yield seccomp select semctl semget semop semtimedop
    semtimedop_time64 send sendfile sendfile64 sendmmsg sendmsg sendto set_robust_list set_thread_area
    set_tid_address set_tls setfsgid setfsgid32 setfsuid setfsuid32 setgid setgid32 setgroups setgroups32
    setitimer setpgid setpriority setregid setregid32 setresgid setresgid32 setresuid setresuid32 setreuid
    setreuid32 setrlimit setsid setsockopt setuid setuid32 setxattr shmat shmctl shmdt shmget shutdown
    sigaltstack signalfd signalfd4 sigpending sigprocmask sigreturn sigsuspend socket socketcall socketpair
    splice stat stat64 statfs statfs64 statx symlink symlinkat sync sync_file_range sync_file_range2 syncfs
    sysinfo tee tgkill time timer_create timer_delete timer_getoverrun timer_gettime timer_gettime64
    timer_settime timer_settime64 timerfd_create timerfd_gettime timerfd_gettime64 timerfd_settime
    timerfd_settime64 times tkill truncate truncate64 ugetrlimit umask uname unlink unlinkat utime utimensat
    utimensat_time64 utimes vfork vmsplice wait4 waitid waitpid write writev
"""

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
PRIO_USER = 2


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
def programs(*, limited: bool = True) -> tuple[bytes, bytes]:
    """Return both filters as BPF instructions, or raise ``MissingDependency`` where libseccomp is absent.

    limited: whether a cgroup counts the box's memory.
    """
    return _known(), _compiled(_refusing(limited, _library().ERRNO(errno.EPERM)))


@functools.cache
def asking(*, limited: bool = True) -> bytes:
    """Return the filter that asks the host about what the second of :func:`programs` refuses by itself."""
    return _compiled(_refusing(limited, _library().NOTIFY))


def name_of(number: int) -> str:
    """Return the name of a system call of this machine."""
    sc = _library()
    names = {value: name for name, value in NEWER.items()}
    try:
        return sc.resolve_syscall(sc.system_arch(), number).decode()
    except (ValueError, OSError, AttributeError):
        return names.get(number, str(number))


def _known() -> bytes:
    """Return the allow-list. What the second filter refuses is known too, so that it is told apart."""
    sc = _library()
    rules = sc.SyscallFilter(sc.ERRNO(errno.ENOSYS))
    named = {_number(name) for name in (ALLOWED + DENIED).split()} | set(NUMBERED)
    for number in named - {None}:
        rules.add_rule(sc.ALLOW, number)
    return _compiled(rules)


@functools.cache
def in_user_space() -> bytes:
    """Return the filter for a kernel in user space, whose own calls are the allow-list.

    gVisor lets everybody make device nodes, of its own devices.
    """
    sc = _library()
    rules = _refusing(False, sc.ERRNO(errno.EPERM))
    rules.add_rule(sc.ERRNO(errno.ENOSYS), "clone3")
    for call, position in (("mknod", 1), ("mknodat", 2)):
        for kind in (stat.S_IFCHR, stat.S_IFBLK):
            device = sc.Arg(position, sc.MASKED_EQ, stat.S_IFMT(0xFFFF), kind)
            rules.add_rule(sc.ERRNO(errno.EPERM), call, device)
    return _compiled(rules)


def _refusing(limited: bool, refuse: Any) -> Any:
    sc = _library()
    rules = sc.SyscallFilter(sc.ALLOW)
    for name in (DENIED if limited else DENIED + UNCOUNTED).split():
        number = _number(name)
        if number is not None:
            rules.add_rule(refuse, number)
    for number in NUMBERED:
        rules.add_rule(refuse, number)
    for flag in NAMESPACE_FLAGS:
        rules.add_rule(refuse, "clone", sc.Arg(0, sc.MASKED_EQ, flag, flag))
    for request in (TIOCSTI, TIOCLINUX):
        rules.add_rule(refuse, "ioctl", sc.Arg(1, sc.MASKED_EQ, 0xFFFFFFFF, request))
    rules.add_rule(refuse, "personality", sc.Arg(0, sc.NE, 0))
    rules.add_rule(refuse, "prlimit64", sc.Arg(0, sc.NE, 0))
    for call, who in (("setpriority", 1), ("sched_setaffinity", 0)):  # process 1 may be of the same user
        rules.add_rule(refuse, call, sc.Arg(who, sc.MASKED_EQ, 0xFFFFFFFF, 1))
    rules.add_rule(refuse, "setpriority", sc.Arg(0, sc.MASKED_EQ, 0xFFFFFFFF, PRIO_USER))
    for family in range(AF_INET + 1, AF_INET6):
        rules.add_rule(sc.ERRNO(errno.EAFNOSUPPORT), "socket", sc.Arg(0, sc.EQ, family))
    rules.add_rule(sc.ERRNO(errno.EAFNOSUPPORT), "socket", sc.Arg(0, sc.GT, AF_INET6))
    return rules


def _compiled(rules: Any) -> bytes:
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
