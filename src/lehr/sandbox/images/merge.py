"""A base and a layer of overlayfs over it, as one plain folder: what the layer left alone is hard links.

A folder needs nothing of whoever uses it later: no mount, no right, no version of bubblewrap; and it stays
whole when its base is removed. Links are safe because boxes cannot write to an image, and because a build,
which can, sees the base through overlayfs, which copies a file before it is changed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from lehr.sandbox.images.declaration import OWN

OPAQUE = ("trusted.overlay.opaque", "user.overlay.opaque")
MARKS = ("trusted.overlay.", "user.overlay.")


def merge(base: Path, layer: Path, target: Path) -> int:
    """Make ``target`` from both, moving the layer's files. Returns the bytes of the layer. Folders at the top
    that a box makes itself are left empty.
    """
    return _folder(str(base), str(layer), str(target), OWN)


def _folder(base: str | None, layer: str | None, target: str, bare: frozenset[str] = frozenset()) -> int:
    """Merge one folder, which exists in at least one of both."""
    own_bytes = 0
    os.mkdir(target, 0o700)
    below = _entries(base)
    above = _entries(layer)
    for name in sorted({*below, *above}):
        over, under, into = above.get(name), below.get(name), f"{target}/{name}"
        info = over or under
        if info is None or (over is not None and _removed(over)):
            continue
        if name in bare and stat.S_ISDIR(info.st_mode):
            os.mkdir(into)
            _keep(into, info)
        elif over is None:
            if stat.S_ISDIR(info.st_mode):
                _folder(f"{base}/{name}", None, into)
            else:
                _link(f"{base}/{name}", into, info)
        elif stat.S_ISDIR(over.st_mode):
            inner = f"{layer}/{name}"
            merged = under is not None and stat.S_ISDIR(under.st_mode) and not _opaque(inner)
            own_bytes += _folder(f"{base}/{name}" if merged else None, inner, into)
        else:
            own_bytes += over.st_blocks << 9
            _unmark(f"{layer}/{name}", over)
            os.rename(f"{layer}/{name}", into)
    _keep(target, os.lstat(layer or base or target))
    return own_bytes


def _entries(folder: str | None) -> dict[str, os.stat_result]:
    if folder is None:
        return {}
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat(follow_symlinks=False) for entry in entries}


def _removed(info: os.stat_result) -> bool:
    """Whether this is how overlayfs marks what was removed."""
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == 0


def _opaque(folder: str) -> bool:
    """Whether a folder of the layer hides that of the base."""
    for name in OPAQUE:
        with contextlib.suppress(OSError):
            if os.getxattr(folder, name, follow_symlinks=False) == b"y":
                return True
    return False


def _unmark(path: str, info: os.stat_result) -> None:
    """Remove what overlayfs noted on a file, so that the next layer over it does not read it."""
    if stat.S_ISREG(info.st_mode):
        for name in os.listxattr(path, follow_symlinks=False):
            if name.startswith(MARKS):
                os.removexattr(path, name, follow_symlinks=False)


def _link(source: str, target: str, info: os.stat_result) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another file system, or files of somebody else
        if stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(source), target)
        elif stat.S_ISREG(info.st_mode):
            shutil.copy2(source, target)
        else:
            return  # a device or a pipe: nothing that an image needs
        with contextlib.suppress(PermissionError):
            os.chown(target, info.st_uid, info.st_gid, follow_symlinks=False)
        if stat.S_ISREG(info.st_mode):
            os.chmod(target, stat.S_IMODE(info.st_mode))


def _keep(folder: str, info: os.stat_result) -> None:
    """Give a folder the owner, mode and times of the one that it stands for."""
    with contextlib.suppress(PermissionError):  # somebody else's, and we are an ordinary user
        os.chown(folder, info.st_uid, info.st_gid)
    os.chmod(folder, stat.S_IMODE(info.st_mode))
    os.utime(folder, ns=(info.st_atime_ns, info.st_mtime_ns))
