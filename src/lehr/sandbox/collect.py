"""Taking files out of a box without being led astray.

The runner inside opens a path following no link at any component and lends the descriptor; the host
judges the descriptor, never the name again, so that nothing can be swapped in between.
"""

from __future__ import annotations

import os
import stat

from lehr.sandbox.errors import Refused


def take(fd: int, path: str, limit_bytes: int) -> bytes:
    """Return the content of a lent descriptor, or raise :class:`Refused`. The caller keeps ``fd``."""
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode):
        raise Refused(f"{path} is not a regular file", expected="a file that the program wrote itself")
    if info.st_nlink != 1:
        raise Refused(f"{path} has {info.st_nlink} names", expected="a file with one name (no hard links)")
    if info.st_size > limit_bytes:
        raise Refused(f"{path} has {info.st_size} bytes", expected=f"at most {limit_bytes} bytes")
    parts: list[bytes] = []
    taken = 0
    while part := os.pread(fd, min(1 << 20, limit_bytes + 1 - taken), taken):
        parts.append(part)
        taken += len(part)
        if taken > limit_bytes:
            raise Refused(f"{path} grew while it was read", expected=f"at most {limit_bytes} bytes")
    return b"".join(parts)


def unpack(fd: int, entries: list[tuple[str, int]]) -> dict[str, bytes | None]:
    """Return the files that the runner packed into one memory file, and None for each folder."""
    files: dict[str, bytes | None] = {}
    at = 0
    for path, size in entries:
        files[path] = None if size < 0 else os.pread(fd, size, at)
        at += max(0, size)
    return files
