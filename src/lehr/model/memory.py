"""Keeps the memory of freed tensors, so that every step reuses it instead of asking the kernel again."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Tell the C library to serve large blocks from its heap and never to give the heap back.

    A large tensor is otherwise a fresh mapping whose pages the kernel clears one by one, at each use.
    Returns whether the C library is one that can be told so (glibc). Holds for the whole process.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1) and mallopt(_M_TOP_PAD, 64 << 20))
