"""Runs process 1 for the fake engines as real ones would: in namespaces of its own, without rights or network.

It is the real runner that runs, so it must be process 1 of a namespace: it ends all processes that it sees.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lehr.sandbox import image
from lehr.sandbox.launch import PATH
from lehr.sandbox.users import choose_users

NAMESPACES = (
    "--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts",
    "--unshare-cgroup-try",
)  # fmt: skip

STARTER = ThreadPoolExecutor(1, "fake-containers")
"""Starts them all: they die with the thread that started them, which a connection's would be too early."""


def require() -> None:
    if shutil.which("bwrap", path=PATH) is None:
        pytest.skip("bubblewrap is not installed, in which the fake engine runs its containers")


def start(
    argv: Sequence[str],
    env: Mapping[str, str],
    disks: Mapping[str, int],
    *,
    user: int,
    read_only: bool,
    profile: Mapping[str, Any] | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``argv`` with pipes. disks: bytes of each memory file system, by where it lies. profile: as engines
    read it.
    """
    command = ["bwrap", *NAMESPACES, "--uid", str(user), "--gid", str(user), "--cap-drop", "ALL"]
    command += ["--as-pid-1", "--die-with-parent", "--new-session", "--hostname", "box", "--clearenv"]
    command += [word for item in env.items() for word in ("--setenv", *item)]
    command += image.arguments()
    for path, size in disks.items():
        command += ["--perms", "0755" if path == "/work" else "1777", "--size", str(size), "--tmpfs", path]
    if read_only:
        command += ["--remount-ro", "/"]
    pipe = subprocess.PIPE
    rules = compiled(profile) if profile is not None else -1
    if rules >= 0:
        command += ["--seccomp", str(rules)]
    other = choose_users().other
    begin = STARTER.submit(
        subprocess.Popen[bytes],
        [*command, "--", *argv],
        stdin=pipe,
        stdout=pipe,
        stderr=pipe,
        env={"PATH": PATH},
        cwd="/",
        bufsize=0,
        user=other,
        group=other,
        extra_groups=None if other is None else [],
        pass_fds=[rules] if rules >= 0 else [],
    )
    try:
        return begin.result()
    finally:
        if rules >= 0:
            os.close(rules)


def compiled(profile: Mapping[str, Any]) -> int:
    """Return a memory file that holds a profile as the kernel reads it, made as runc makes it."""
    sc = pytest.importorskip("pyseccomp", reason="libseccomp is not installed")

    def action(rule: Mapping[str, Any], key: str, number: str) -> int:
        return {"SCMP_ACT_ALLOW": sc.ALLOW, "SCMP_ACT_ERRNO": sc.ERRNO(rule.get(number, 1))}[rule[key]]

    rules = sc.SyscallFilter(action(profile, "defaultAction", "defaultErrnoRet"))
    for rule in profile["syscalls"]:
        args = [
            sc.Arg(
                arg["index"], getattr(sc, arg["op"].removeprefix("SCMP_CMP_")), arg["value"], arg["valueTwo"]
            )
            for arg in rule.get("args", ())
        ]
        for name in rule["names"]:
            if known(sc, name):
                rules.add_rule(action(rule, "action", "errnoRet"), name, *args)
    fd = os.memfd_create("profile", 0)
    with os.fdopen(os.dup(fd), "wb") as handle:
        rules.export_bpf(handle)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def known(sc: Any, name: str) -> bool:
    try:
        return sc.resolve_syscall(sc.system_arch(), name) >= 0
    except (ValueError, OSError):
        return False


def end(process: subprocess.Popen[bytes]) -> None:
    """End process 1, and return once nothing of its namespace is left."""
    for child in children(process.pid):
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(child)
            try:
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                select.select([handle], [], [], 5.0)
            finally:
                os.close(handle)
    process.kill()
    process.wait()


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
