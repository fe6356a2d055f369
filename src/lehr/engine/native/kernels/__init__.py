"""What runs between the matrix products of a step, compiled once on the machine that runs it.

``kernels.cpp`` needs nothing but a C++ compiler and takes a few seconds; the library is kept in
``$LEHR_HOME/kernels`` (or ``~/.cache/lehr/kernels``) under a digest of the source, the compiler and the
processor. Without a compiler the engine computes the same with torch's operations, at about half the speed,
and says so once.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from ctypes import c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math",
    "-fassociative-math", "-fno-signed-zeros", "-shared", "-fPIC",
)  # fmt: skip
COMPILE_S = 120.0
INSTALL = "Install a compiler: `apt-get install g++`"
ARGUMENTS = {
    "norm": (*[c_void_p] * 4, c_int64, c_int64, c_float),
    "gated": (c_void_p, c_void_p, c_int64, c_int64),
    "rotate": (*[c_void_p] * 8, *[c_int64] * 5, c_float),
    "attend": (*[c_void_p] * 4, *[c_int64] * 5),
    "draw": (*[c_void_p] * 5, c_int64, c_int64),
}
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Kernels:
    """The compiled functions for one number format. They work on memory by address: see ``kernels.cpp``."""

    def __init__(self, library: ctypes.CDLL, suffix: str) -> None:
        for name, arguments in ARGUMENTS.items():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = arguments, None
            setattr(self, name, function)

    norm: Any
    gated: Any
    rotate: Any
    attend: Any
    draw: Any


def kernels_for(dtype: torch.dtype) -> Kernels | None:
    """Return the kernels for a dtype, or None where they cannot be had; :func:`why_not` says why."""
    library = _library()
    return Kernels(library, DTYPES[dtype]) if library is not None and dtype in DTYPES else None


@functools.cache
def why_not() -> str:
    """Return why there are no kernels here, or ""."""
    if _compiler() is None:
        return "there is no C++ compiler"
    try:
        _built()
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        return f"they cannot be compiled: {said.strip()[-300:]}"
    return ""


@functools.cache
def _library() -> ctypes.CDLL | None:
    why = why_not()
    if why:
        log.warning("The engine samples at about half its speed: no kernels, %s. %s", why, INSTALL)
        return None
    return ctypes.CDLL(str(_built()))


def _compiler() -> str | None:
    chosen = os.environ.get("CXX")
    return shutil.which(chosen) if chosen else next(filter(None, map(shutil.which, ("g++", "c++"))), None)


@functools.cache
def _built() -> Path:
    """Return the library, compiled unless it is there already. Raises ``OSError`` or ``SubprocessError``."""
    compiler = _compiler() or "g++"
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_S, check=True).stdout
    parts = (SOURCE.read_bytes(), version, " ".join(FLAGS).encode(), _processor())
    digest = hashlib.blake2b(b"\0".join(parts), digest_size=12).hexdigest()
    folder = _folder()
    path = folder / f"kernels-{digest}.so"
    if not _is_ours(path):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / path.name
            command = [compiler, *FLAGS, "-o", str(made), str(SOURCE)]
            subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_S, check=True)
            made.rename(path)
    return path


def _folder() -> Path:
    base = os.environ.get("LEHR_HOME")
    cache = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lehr"
    folder = cache / "kernels"
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
