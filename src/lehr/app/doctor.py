"""What this machine can do, what it lacks, and the command that mends it. Loads nothing heavy."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

State = Literal["ok", "warn", "missing"]

NEEDED_MEMORY = 3 << 30
NEEDED_DISK = 4 << 30
MIN_PYTHON = (3, 11)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. ``missing`` stops the quickstart; ``warn`` makes it weaker or slower."""

    name: str
    state: State
    detail: str
    mend: str = ""


def examine() -> list[Check]:
    """Return every check, the ones of the sandbox included."""
    return [*machine_checks(), *package_checks(), *sandbox_checks()]


def machine_checks() -> list[Check]:
    """Return what the machine has: Python, cores, memory, disk, a place for models, GPU."""
    checks = [
        Check(
            "python",
            "ok" if sys.version_info >= MIN_PYTHON else "missing",
            platform.python_version(),
            "" if sys.version_info >= MIN_PYTHON else "sudo apt-get install -y python3 python3-venv",
        )
    ]
    cores = len(os.sched_getaffinity(0))
    flags = _cpu_flags()
    matrix = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in flags]
    detail = f"{cores}, {matrix[0] if matrix else 'no vector extension found'}"
    if matrix[:1] not in (["amx_bf16"], ["avx512_bf16"]):
        detail += " (computes in float32; bfloat16 would need avx512_bf16 or amx)"
    checks.append(
        Check("cores", "ok" if cores >= 2 else "warn", detail, "" if cores >= 2 else "expect half the speed")
    )
    checks.append(_compiler())
    checks.append(_memory())
    checks.append(_disk(Path.cwd()))
    checks.append(_home())
    checks.append(_gpu())
    return checks


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def _compiler() -> Check:
    from lehr.engine.native.kernels.build import compiler

    if found := compiler():
        return Check("compiler", "ok", f"{found} compiles the engine's kernels at its first start")
    detail = "no C++ compiler: the engine samples at about half its speed"
    return Check("compiler", "warn", detail, "sudo apt-get install -y g++")


def _memory() -> Check:
    import psutil

    memory = psutil.virtual_memory()
    enough = memory.available >= NEEDED_MEMORY
    return Check(
        "memory",
        "ok" if enough else "missing",
        f"{memory.available / (1 << 30):.1f} GiB free of {memory.total / (1 << 30):.1f}",
        "" if enough else f"free some: the quickstart needs {NEEDED_MEMORY >> 30} GiB",
    )


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    enough = free >= NEEDED_DISK
    return Check(
        "disk",
        "ok" if enough else "missing",
        f"{free / (1 << 30):.1f} GiB free at {folder}",
        "" if enough else f"free some, or use --run on another disk: a run needs {NEEDED_DISK >> 30} GiB",
    )


def _home() -> Check:
    from lehr.core.errors import HostUnfit, OutOfSpace
    from lehr.model.fetch import MODELS, fetched, ready_home

    try:
        return Check("models", "ok", f"kept in {ready_home()}")
    except (HostUnfit, OutOfSpace) as error:
        here = all(fetched(name) for name in MODELS)
        return Check("models", "warn" if here else "missing", error.what, error.hint)


def _gpu() -> Check:
    program = shutil.which("nvidia-smi")
    if program is None:
        return Check("gpu", "ok", "none; everything runs on the processor")
    try:
        done = subprocess.run(
            [program, "--query-gpu=name,memory.total", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("gpu", "warn", f"nvidia-smi does not answer: {error}")
    names = "; ".join(done.stdout.strip().splitlines())
    if done.returncode or not names:
        return Check("gpu", "warn", f"nvidia-smi failed: {done.stderr.strip() or done.stdout.strip()}")
    return Check("gpu", "ok", f"{names} (the embedded engine and trainer use the processor)")


def package_checks() -> list[Check]:
    """Return whether the Python packages that lehr asks for are installed."""
    absent = [name for name in _required() if not _installed(name)]
    if absent:
        return [
            Check("packages", "missing", f"not installed: {', '.join(absent)}", "make setup, or pip install .")
        ]
    return [Check("packages", "ok", f"torch {version('torch')}, numpy {version('numpy')}")]


def _required() -> Iterable[str]:
    try:
        lines = requires("lehr") or []
    except PackageNotFoundError:
        return ["lehr"]
    return [re.split(r"[\s<>=!~;\[]", line, maxsplit=1)[0] for line in lines if "extra ==" not in line]


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def sandbox_checks() -> list[Check]:
    """Return what isolates the code that a model writes, and whether a box really runs here."""
    from lehr.app.preflight import box_problem
    from lehr.sandbox.host import probe

    report = probe()
    restricted = {None: "no such switch", False: "not restricted", True: "restricted"}[
        report.apparmor_restricts
    ]
    limited = ", ".join(report.controllers) or "nothing"
    found = {
        "bubblewrap": f"{report.bwrap} {report.bwrap_version}",
        "libseccomp": f"{report.libseccomp}",
        "seccomp": "system calls can be filtered",
        "python3": f"{report.python} (for use inside boxes)",
        "user namespaces": f"allowed to {report.user}; AppArmor: {restricted}",
        "cgroups": f"{report.cgroups}; {report.user} limits {limited} with them",
        "landlock": f"ABI {report.landlock_abi}" if report.landlock_abi else "none in this kernel",
    }
    lacks = {lack.name: lack for lack in report.lacks}
    checks = [Check(name, "ok", detail) for name, detail in found.items() if name not in lacks]
    checks += [
        Check(lack.name, "missing" if lack.needed else "warn", lack.why, as_typed(lack.mend))
        for lack in lacks.values()
    ]
    if report.fit:
        problem = box_problem()
        state: State = "missing" if problem else "ok"
        detail = problem.what if problem else "a program ran in one"
        checks.append(Check("box", state, detail, (problem.hint or problem.expected) if problem else ""))
    return checks


def as_typed(command: str) -> str:
    """Return a mending command as this user has to type it."""
    needs_root = command.startswith(("apt-get ", "sysctl ", "mount "))
    if not needs_root or os.geteuid() == 0:
        return command
    return " && ".join(
        f"sudo {part}" if not part.startswith("pip ") else part for part in command.split(" && ")
    )
