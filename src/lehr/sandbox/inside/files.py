"""Files of the box, opened component by component without ever following a link."""

from __future__ import annotations

import errno
import os
import stat

WALK = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
OPEN_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
DEPTH = 128
NAMES_BYTES = 1 << 20
CHUNK = 1 << 16

FOLDER, LINK, SPECIAL, CLOSED_FILE, CLOSED_FOLDER = -1, -2, -3, -4, -5


def enter(name: str, here: int | None = None) -> int:
    """Open a folder to look names up in. Not by ``O_DIRECTORY``, which makes gVisor follow a last link."""
    there = os.open(name, WALK, dir_fd=here)
    if not stat.S_ISDIR(os.fstat(there).st_mode):
        os.close(there)
        raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    return there


def folder(path: str, create: bool = False) -> tuple[int, str]:
    """Open the parent of ``path`` (relative to /work); return it and the last name."""
    parts = [part for part in os.path.normpath(os.path.join("/work", path)).split("/") if part]
    if len(parts) > DEPTH:
        raise OSError(errno.ENAMETOOLONG, f"deeper than {DEPTH} folders")
    here = enter("/")
    for part in parts[:-1]:
        try:
            if create:
                _make(part, here)
            there = enter(part, here)
        finally:
            os.close(here)
        here = there
    return here, parts[-1] if parts else "."


def _make(name: str, here: int) -> None:
    try:
        os.mkdir(name, 0o755, dir_fd=here)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.EROFS, errno.EACCES):
            raise


def create(path: str, mode: int) -> int:
    """Open a regular file for writing, emptied; its folders are made."""
    parent, name = folder(path, create=True)
    try:
        fd = os.open(name, os.O_WRONLY | os.O_CREAT | OPEN_FILE, mode, dir_fd=parent)
    finally:
        os.close(parent)
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
            raise OSError(errno.EPERM, "not a regular file with one name")
        os.ftruncate(fd, 0)
        os.fchmod(fd, mode)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_to_read(path: str) -> int:
    """Open whatever ``path`` names, without waiting and without following; the host judges it."""
    parent, name = folder(path)
    try:
        return os.open(name, os.O_RDONLY | OPEN_FILE, dir_fd=parent)
    finally:
        os.close(parent)


def write_all(fd: int, data: bytes) -> None:
    """Write all of ``data``."""
    while data:
        data = data[os.write(fd, data) :]


def pack_tree(path: str, pack: int, limit_files: int, limit_bytes: int) -> list[tuple[str, int]]:
    """Append every regular file below ``path`` to ``pack``; return (name, size). What is no such file has
    FOLDER, LINK, SPECIAL, CLOSED_FILE or CLOSED_FOLDER for its size.
    """
    entries: list[tuple[str, int]] = []
    room, names = limit_bytes, 0
    todo = [("", -1)]
    while todo:
        inner, number = todo.pop()
        parent, name = folder(os.path.join(path, inner))
        try:
            there = enter(name, parent)
            try:
                here = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=there)
            finally:
                os.close(there)
        except OSError:
            if not inner:
                raise
            entries[number] = (inner, CLOSED_FOLDER)
            continue
        finally:
            os.close(parent)
        try:
            for item in sorted(os.listdir(here)):
                size = _pack(here, item, pack, room)
                if size is None:
                    continue
                entries.append((os.path.join(inner, item), size))
                names += len(entries[-1][0])
                if len(entries) > limit_files or names > NAMES_BYTES:
                    raise OSError(errno.E2BIG, f"more than {limit_files} files, or names too long")
                if size == FOLDER:
                    todo.append((entries[-1][0], len(entries) - 1))
                room -= max(0, size)
        finally:
            os.close(here)
    return entries


def _pack(here: int, name: str, pack: int, room: int) -> int | None:
    try:
        info = os.stat(name, dir_fd=here, follow_symlinks=False)
        if stat.S_ISDIR(info.st_mode):
            return FOLDER
        if not stat.S_ISREG(info.st_mode):
            return LINK if stat.S_ISLNK(info.st_mode) else SPECIAL
        if info.st_size > room:
            raise OSError(errno.EFBIG, "more bytes than allowed in all")
        fd = os.open(name, os.O_RDONLY | OPEN_FILE, dir_fd=here)
    except OSError as error:
        if error.errno == errno.ENOENT:  # it has gone meanwhile
            return None
        if error.errno in (errno.EACCES, errno.ELOOP):
            return LINK if error.errno == errno.ELOOP else CLOSED_FILE
        raise
    size = 0
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return SPECIAL
        while part := os.read(fd, CHUNK):
            size += len(part)
            if size > room:
                raise OSError(errno.EFBIG, "more bytes than allowed in all")
            write_all(pack, part)
    finally:
        os.close(fd)
    return size
