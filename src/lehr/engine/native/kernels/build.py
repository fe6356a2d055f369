"""What runs between the matrix products of a step, compiled once on the machine that runs it.

The ``.cpp`` files of this folder need nothing but a C++ compiler and take a few seconds; the library is kept in
``$LEHR_HOME/kernels`` (or ``~/.cache/lehr/kernels``) under a digest of the source, the compiler and the
processor. Without a compiler the engine computes the same with torch's operations, at about half the speed,
and says so once.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from lehr.model.fetch import cache

HERE = Path(__file__).parent
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-fassociative-math", "-fno-signed-zeros", "-shared", "-fPIC",
)  # fmt: skip
COMPILE_S = 120.0
INSTALL = "Install a compiler: `apt-get install g++`"


@functools.cache
def why_not() -> str:
    """Return why there are no kernels here, or ""."""
    if compiler() is None:
        return "there is no C++ compiler"
    try:
        built()
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        return f"they cannot be compiled: {said.strip()[-300:]}"
    return ""


def compiler() -> str | None:
    """Return the compiler to use: ``$CXX``, else g++ or c++."""
    chosen = os.environ.get("CXX")
    return shutil.which(chosen) if chosen else next(filter(None, map(shutil.which, ("g++", "c++"))), None)


@functools.cache
def built() -> Path:
    """Return the library, compiled unless it is there already. Raises ``OSError`` or ``SubprocessError``."""
    program = compiler() or "g++"
    version = _run([program, "--version"])
    sources, headers = sorted(HERE.glob("*.cpp")), sorted(HERE.glob("*.h"))
    code = b"\0".join(file.read_bytes() for file in (*sources, *headers))
    parts = (code, version.encode(), " ".join(FLAGS).encode(), _processor())
    digest = hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()
    folder = _folder()
    path = folder / f"kernels-{digest}.so"
    if not _is_ours(path):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            _run([program, *FLAGS, "-o", str(made), *map(str, sources)])
            made.rename(path)
    return path


def _run(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=True).stdout


def _folder() -> Path:
    folder = cache() / "kernels"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{folder} can be written by others: code is not loaded from there")
    return folder


def _is_ours(path: Path) -> bool:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()


def _processor() -> bytes:
    """Return what the compiled code depends on: the processor's instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        return os.uname().machine.encode()
    return next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
