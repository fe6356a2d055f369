"""What this machine can isolate, and for each lack the command that mends it. Read by ``lehr doctor``."""

from __future__ import annotations

import ctypes
import getpass
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lehr.core.errors import HostUnfit, MissingDependency
from lehr.sandbox import image, seccomp
from lehr.sandbox.launch import PATH
from lehr.sandbox.places import NEEDED, find_places
from lehr.sandbox.users import choose_users

SYS_LANDLOCK_CREATE_RULESET = 444
PROBE_S = 10
DOCTOR = "Run `lehr doctor` for what is missing and the command that mends it"


@dataclass(frozen=True, slots=True)
class Lack:
    """Something that this host does not have. ``needed`` ones make boxes impossible, others weaker.

    mend: a command to type, or the setting to change.
    """

    name: str
    why: str
    mend: str
    needed: bool = True


@dataclass(frozen=True, slots=True)
class HostReport:
    """What :func:`probe` found.

    bwrap, python: paths, or None. libseccomp: its version, or None. user_namespaces: whether bubblewrap
    can make one here. apparmor_restricts: ``kernel.apparmor_restrict_unprivileged_userns``, None where the
    kernel has no such switch. cgroups: ``v1``, ``v2``, ``hybrid`` or ``none``. controllers: folder by
    controller, those that ``user`` may use. landlock_abi: 0 where the kernel has none.
    """

    kernel: str
    machine: str
    user: str
    bwrap: str | None
    bwrap_version: str
    libseccomp: str | None
    seccomp: bool
    python: str | None
    user_namespaces: bool
    apparmor_restricts: bool | None
    cgroups: str
    controllers: Mapping[str, str]
    landlock_abi: int
    lacks: tuple[Lack, ...] = ()

    @property
    def fit(self) -> bool:
        """Whether boxes can be made at all."""
        return not any(lack.needed for lack in self.lacks)

    @property
    def limited(self) -> bool:
        """Whether cgroups hold the limits; else rlimits stand in."""
        return all(name in self.controllers for name in NEEDED)


def probe() -> HostReport:
    """Look at this machine. Takes a few milliseconds; makes one throw-away user namespace."""
    lacks: list[Lack] = []
    bwrap = shutil.which("bwrap", path=PATH)
    version = _output([bwrap, "--version"]).split()[-1:] if bwrap else []
    if bwrap is None:
        lacks.append(Lack("bubblewrap", "bwrap is not installed", "apt-get install bubblewrap"))
    library = _libseccomp(lacks)
    kernel_seccomp = Path("/proc/sys/kernel/seccomp/actions_avail").exists()
    if not kernel_seccomp:
        lacks.append(
            Lack("seccomp", "the kernel was built without it", "boot a kernel with CONFIG_SECCOMP_FILTER")
        )
    python = image.system_python()
    if python is None:
        lacks.append(Lack("python3", "none in the system folders that a box sees", "apt-get install python3"))
    refused = _refusal(bwrap) if bwrap else ""
    if refused:
        lacks.append(Lack("user namespaces", refused, namespace_mend()))
    places = find_places()
    if not places.usable:
        why = "; ".join(f"{name}: {reason}" for name, reason in sorted(places.lacking.items()))
        lacks.append(Lack("cgroups", why, cgroup_mend(places.version), needed=False))
    restricts = _switch("kernel/apparmor_restrict_unprivileged_userns")
    return HostReport(
        kernel=platform.release(),
        machine=platform.machine(),
        user=_user(),
        bwrap=bwrap,
        bwrap_version=version[0] if version else "",
        libseccomp=library,
        seccomp=kernel_seccomp,
        python=python,
        user_namespaces=bool(bwrap) and not refused,
        apparmor_restricts=None if restricts is None else restricts != 0,
        cgroups=places.version,
        controllers={name: str(place.folder) for name, place in sorted(places.controllers.items())},
        landlock_abi=_landlock(),
        lacks=tuple(lacks),
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.geteuid())


def _output(argv: list[str]) -> str:
    try:
        return subprocess.run(argv, capture_output=True, text=True, timeout=PROBE_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _libseccomp(lacks: list[Lack]) -> str | None:
    try:
        return seccomp.version()
    except MissingDependency as error:
        mend = "apt-get install libseccomp2 && pip install pyseccomp"
        lacks.append(Lack("libseccomp", error.what, mend))
        return None


def _switch(name: str) -> int | None:
    try:
        return int(Path("/proc/sys", name).read_text())
    except (OSError, ValueError):
        return None


def _refusal(bwrap: str) -> str:
    """Return what bubblewrap says when it may not make the namespaces of a box, or nothing."""
    inner = [
        bwrap,
        "--unshare-user",
        "--unshare-pid",
        "--unshare-net",
        "--ro-bind",
        "/",
        "/",
        "--proc",
        "/proc",
    ]
    try:
        user = choose_users().other
        done = subprocess.run(
            [*inner, "--", "/bin/true"],
            capture_output=True,
            timeout=PROBE_S,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    said = done.stderr.decode(errors="replace").strip()
    return "" if done.returncode == 0 else said or f"bubblewrap ended with status {done.returncode}"


def namespace_mend() -> str:
    """Return the command that allows user namespaces here, by what forbids them."""
    if _switch("kernel/apparmor_restrict_unprivileged_userns"):
        return "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
    if _switch("kernel/unprivileged_userns_clone") == 0:
        return "sysctl -w kernel.unprivileged_userns_clone=1"
    if _switch("user/max_user_namespaces") == 0:
        return "sysctl -w user.max_user_namespaces=15000"
    return (
        "allow them to this container: docker run --security-opt seccomp=unconfined "
        "--security-opt apparmor=unconfined --security-opt systempaths=unconfined …"
    )


def cgroup_mend(version: str) -> str:
    """Return the command that gives this user control groups of its own."""
    if version == "v2":
        return "systemd-run --user --scope -p Delegate=yes lehr …"
    if version == "none":
        return "mount -t cgroup2 none /sys/fs/cgroup"
    user, groups = _user(), "memory,pids,cpu,cpuacct:lehr"
    return f"cgcreate -a {user} -t {user} -g {groups} (as root), then: cgexec -g {groups} lehr …"


def _landlock() -> int:
    """Return the Landlock ABI of the kernel, 0 where there is none."""
    library = ctypes.CDLL(None, use_errno=True)
    version: int = library.syscall(ctypes.c_long(SYS_LANDLOCK_CREATE_RULESET), None, ctypes.c_size_t(0), 1)
    return max(0, version)


def unfit(said: str) -> HostUnfit:
    """Return the error for a box that did not come up, with the mend if what is lacking can be found."""
    said = said or "it ended without a word"
    lacks = [lack for lack in probe().lacks if lack.needed]
    hint = f"{lacks[0].name}: {lacks[0].why}. Mend it: `{lacks[0].mend}`" if lacks else DOCTOR
    return HostUnfit(f"bubblewrap could not make a box: {said}", hint=hint)
