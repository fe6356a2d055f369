"""A segment's bytes, made smaller without loss, under a checksum.

The bytes of a number are stored plane by plane: the first bytes of all, the second bytes of all, and so on. In
the plane of signs and exponents few values occur, and zstd's entropy coder halves it; mantissas are noise and
stay as they are. Of bfloat16 keys and values a quarter goes away.

A packed segment is a digest (BLAKE2b, keyed by the segment's name), the size of each plane as packed (uint32,
little endian), and the planes.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lehr.core.errors import LehrError

LEVEL = 1
WORTH = 0.95
"""A plane whose first part does not get smaller than this share of itself stays as it is."""
PROBE = 4096
DIGEST = 16
_own = threading.local()

Bytes = NDArray[np.uint8]


class Damaged(LehrError, ValueError):
    """A packed segment that is not what was packed."""

    code = "damaged_segment"


def pack(name: bytes, raw: Bytes, item_bytes: int) -> bytes:
    """Return ``raw``, numbers of ``item_bytes`` bytes each, packed under ``name``."""
    planes: list[bytes] = []
    for plane in raw.reshape(-1, item_bytes).T:
        plain = np.ascontiguousarray(plane)
        planes.append(_smaller(plain))
    sizes = np.array([len(p) for p in planes], "<u4").tobytes()
    body = b"".join([sizes, *planes])
    return _digest(name, body) + body


def unpack(name: bytes, packed: bytes | memoryview, raw_bytes: int, item_bytes: int) -> Bytes:
    """Return the ``raw_bytes`` that were packed under ``name``. Raises :class:`Damaged`."""
    view = memoryview(packed)
    body = view[DIGEST:]
    if bytes(view[:DIGEST]) != _digest(name, body):
        raise Damaged(f"{len(view)} bytes of segment {name.hex()} have another checksum")
    sizes = np.frombuffer(body[: 4 * item_bytes], "<u4").tolist()
    at, length = 4 * item_bytes, raw_bytes // item_bytes
    if item_bytes == 1:
        return np.frombuffer(_plane(body[at:], sizes[0], length), np.uint8)
    raw = np.empty((length, item_bytes), np.uint8)
    for number, size in enumerate(sizes):
        raw[:, number] = np.frombuffer(_plane(body[at : at + size], size, length), np.uint8)
        at += size
    return raw.reshape(-1)


def _smaller(plane: Bytes) -> bytes:
    """Return a plane compressed, or as it is where that does not pay, which a part of it tells."""
    probe = plane[: max(PROBE, len(plane) // 16)]
    if len(_compressor().compress(probe)) < WORTH * len(probe):
        small = _compressor().compress(plane)
        if len(small) < len(plane):
            return small
    return plane.tobytes()


def _plane(part: memoryview, size: int, length: int) -> Any:
    return part if size == length else _decompressor().decompress(part, max_output_size=length)


def _digest(name: bytes, body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, key=name, digest_size=DIGEST).digest()


def _compressor() -> Any:
    if not hasattr(_own, "compressor"):
        _own.compressor = _zstd().ZstdCompressor(level=LEVEL, write_checksum=False)
    return _own.compressor


def _decompressor() -> Any:
    if not hasattr(_own, "decompressor"):
        _own.decompressor = _zstd().ZstdDecompressor()
    return _own.decompressor


@functools.cache
def _zstd() -> Any:
    import zstandard  # loaded where there are tiers only

    return zstandard
