"""The ``host`` image: an allow-list of this machine's system folders, and nothing else of it.

Never inside a box: a home, the project, a virtual environment, an installed lehr, ``/etc`` beyond a few
harmless files. Folders that hold any of those below an allow-listed one are covered by an empty one.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path

ETC = (
    "alternatives",
    "ssl/certs",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "nsswitch.conf",
)
ETC_GLOBS = ("python3*",)
ROOT_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
DEVICES = ("null", "zero", "full", "random", "urandom")
MASKED_PROC = (
    "kcore",
    "keys",
    "key-users",
    "timer_list",
    "sched_debug",
    "latency_stats",
    "config.gz",
    "kallsyms",
)
PASSWD = b"root:x:0:0::/nonexistent:/bin/false\nbox:x:1000:1000::/work:/bin/sh\n"
GROUP = b"root:x:0:\nbox:x:1000:\n"
HOSTS = b"127.0.0.1 localhost\n::1 localhost\n"
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/work",
    "LANG": "C.UTF-8",
    "TMPDIR": "/tmp",
    "USER": "box",
}


def system_python() -> str | None:
    """Return the python3 that a box can run, or None: it must live in the allow-listed system."""
    for candidate in ("/usr/bin/python3", "/usr/local/bin/python3"):
        real = os.path.realpath(candidate)
        if real.startswith("/usr/") and os.access(real, os.X_OK):
            return candidate
    return None


def _private() -> Iterator[Path]:
    """Yield the folders of this installation and of its user that no box may see."""
    yield Path(__file__).resolve().parents[1]
    yield Path.cwd()
    yield Path.home()
    if sys.prefix != sys.base_prefix:
        yield Path(sys.prefix)
    yield Path("/usr/src")
    yield Path("/usr/local/src")
    python = system_python()
    if python is None or not os.path.realpath(python).startswith("/usr/local/"):
        yield Path("/usr/local")
    for folder in (*Path("/usr").glob("lib*/python3*"), *Path("/usr/local").glob("lib*/python3*")):
        for packages in (folder / "site-packages", folder / "dist-packages"):
            if (packages / "lehr").exists() or any(packages.glob("*lehr*")):
                yield packages


def covered() -> list[Path]:
    """Return the folders below ``/usr`` that an empty one must cover."""
    found: list[Path] = []
    for folder in sorted(set(_private())):
        below = folder.is_dir() and folder.is_relative_to("/usr") and folder != Path("/usr")
        if below and not any(folder.is_relative_to(done) for done in found):
            found.append(folder)
    return found


def etc() -> list[Path]:
    """Return what of ``/etc`` a box may see."""
    found = [Path("/etc", name) for name in ETC]
    found += [path for pattern in ETC_GLOBS for path in sorted(Path("/etc").glob(pattern))]
    return [path for path in found if path.exists()]


@functools.cache
def arguments() -> tuple[str, ...]:
    """Return the bubblewrap arguments that lay out this host's system, read-only."""
    out: list[str] = ["--perms", "0755", "--dir", "/etc", "--ro-bind", "/usr", "/usr"]
    for name in ROOT_LINKS:
        path = Path("/", name)
        if path.is_symlink():
            out += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            out += ["--ro-bind", str(path), str(path)]
    for folder in covered():
        out += ["--size", "4096", "--tmpfs", str(folder), "--remount-ro", str(folder)]
    for path in etc():
        if path.parent != Path("/etc"):
            out += ["--perms", "0755", "--dir", str(path.parent)]
        out += ["--ro-bind", os.path.realpath(path), str(path)]
    return (*out, "--dir", "/var", "--symlink", "../tmp", "/var/tmp", *furniture())


def furniture() -> tuple[str, ...]:
    """Return the bubblewrap arguments of what every image has beside its system."""
    out = ["--perms", "0755", "--dir", "/dev"]
    for name in DEVICES:
        out += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        out += ["--symlink", target, f"/dev/{name}"]
    out += ["--proc", "/proc"]
    for folder in ("/work", "/tmp", "/dev/shm", "/run"):
        out += ["--dir", folder]
    return tuple(out)


ETC_FILES = (("/etc/passwd", PASSWD), ("/etc/group", GROUP), ("/etc/hosts", HOSTS))
"""Small files that are made up rather than shared."""
