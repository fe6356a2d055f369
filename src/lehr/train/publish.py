"""Weights for engines: one safetensors file per version, complete and immutable under its name."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from lehr.core.batch import Manifest
from lehr.core.errors import OutOfSpace
from lehr.core.trace import Version

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
_PART = 16 << 20


class Publisher:
    """Writes versions into one folder and removes a version when ``keep`` newer ones exist."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep

    def publish(self, version: Version, tensors: Mapping[str, Tensor]) -> Manifest:
        """Write ``tensors``, rename the file into place and return its manifest.

        Raises :class:`OutOfSpace`; versions that were there before are then intact.
        """
        path = self.folder / f"weights-{version.incarnation:08d}-{version.n:08d}.safetensors"
        work = path.with_suffix(".part")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            digest, nbytes = write_safetensors(work, tensors)
            work.replace(path)
        except OSError as error:
            work.unlink(missing_ok=True)
            raise OutOfSpace(f"cannot publish {path}: {error}", hint="Free space and run again.") from error
        for old in sorted(self.folder.glob("weights-*.safetensors"))[: -self.keep]:
            old.unlink(missing_ok=True)
        return Manifest(version, str(path), digest, nbytes)

    def clear(self) -> None:
        """Remove every version and every unfinished file."""
        for pattern in ("weights-*.safetensors", "weights-*.part"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """Write contiguous ``tensors`` to ``path``; return the blake2b-128 of the file and its size in bytes.

    Nothing is copied on the way; the digest is computed beside the writing.
    """
    digest = hashlib.blake2b(digest_size=16)
    nbytes = 0
    pending: Future[None] | None = None
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        for part in _parts(tensors):
            if pending is not None:
                pending.result()
            pending = hasher.submit(digest.update, part)
            written = 0
            while written < len(part):
                written += os.write(file.fileno(), part[written:])
            nbytes += len(part)
        if pending is not None:
            pending.result()
    return digest.hexdigest(), nbytes


def _parts(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 64 + 56)
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for tensor in tensors.values():
        raw = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(raw), _PART):
            yield raw[start : start + _PART]
