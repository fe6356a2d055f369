"""Taking files out of a box without being led astray.

The runner inside opens a path following no link at any component and lends the descriptor; the host
judges the descriptor, never the name again, so that nothing can be swapped in between.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

from lehr.sandbox.base import Entry, Unread
from lehr.sandbox.errors import Refused

KINDS: tuple[Entry, ...] = (b"", None, Unread("link"), Unread("special"), Unread("file"), Unread("folder"))
"""What stands for a negative size in the runner's list; see ``inside/files.py``."""


def take(fd: int, path: str, limit_bytes: int) -> bytes:
    """Return the content of a lent descriptor, or raise :class:`Refused`. The caller keeps ``fd``."""
    info = os.fstat(fd)
    regular = stat.S_ISREG(info.st_mode)
    parts: list[bytes] = []
    room = limit_bytes + 1 if regular and info.st_nlink == 1 and info.st_size <= limit_bytes else 0
    while room and (part := os.pread(fd, min(1 << 20, room), limit_bytes + 1 - room)):
        parts.append(part)
        room -= len(part)
    data = b"".join(parts)
    return judge(data, path, limit_bytes, regular=regular, names=info.st_nlink, size=info.st_size)


def unpack(fd: int, entries: list[tuple[str, int]]) -> dict[str, Entry]:
    """Return the files that the runner packed into one memory file, and what else is there."""
    files: dict[str, Entry] = {}
    at = 0
    for path, size in entries:
        files[path] = KINDS[-size] if size < 0 else os.pread(fd, size, at)
        at += max(0, size)
    return files


def judge(data: bytes, path: str, limit_bytes: int, *, regular: bool, names: int, size: int) -> bytes:
    """Return a file's content that came without a descriptor, by what the runner saw of it, or refuse it.

    size: what the file claimed; ``data`` may be shorter where that is beyond the limit.
    """
    if not regular:
        raise Refused(f"{path} is not a regular file", expected="a file that the program wrote itself")
    if names != 1:
        raise Refused(f"{path} has {names} names", expected="a file with one name (no hard links)")
    if size > limit_bytes:
        raise Refused(f"{path} has {size} bytes", expected=f"at most {limit_bytes} bytes")
    if len(data) > limit_bytes:
        raise Refused(f"{path} grew while it was read", expected=f"at most {limit_bytes} bytes")
    return data


def cut(data: bytes, entries: Sequence[object], limit_files: int) -> dict[str, Entry]:
    """Return the files of a pack that came without a descriptor, and what else is there; refuse nonsense."""
    files: dict[str, Entry] = {}
    at = 0
    for entry in entries:
        match entry:
            case [str(path), int(size)] if -len(KINDS) < size <= len(data) - at and len(files) <= limit_files:
                files[path] = KINDS[-size] if size < 0 else data[at : at + size]
                at += max(0, size)
            case _:
                raise Refused(f"the box sent a tree with {entry!r}"[:200], expected="a name and a size")
    return files
