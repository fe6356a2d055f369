"""Content-addressed blobs: a file per content, named by its hash, complete from the moment it has its name."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from pathlib import Path

from lehr.core.errors import LehrError, OutOfSpace


class BlobMissing(LehrError, LookupError):
    """A blob that is not in the store, or whose content is not what its name says."""

    code = "blob_missing"


class BlobStore:
    """A folder of blobs. :meth:`put` returns once the bytes are durable, so a row may name them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, data: bytes) -> str:
        """Store ``data`` and return its digest. The same bytes are stored once."""
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        path = self._path(digest)
        if path.exists():
            return digest
        try:
            new_folder = not path.parent.exists()
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".new-", delete=False) as out:
                try:
                    out.write(data)
                    out.flush()
                    os.fsync(out.fileno())
                    Path(out.name).replace(path)
                except BaseException:
                    Path(out.name).unlink(missing_ok=True)
                    raise
            _sync_folder(path.parent)
            if new_folder:
                _sync_folder(self.folder)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfSpace(
                    f"no space left in {self.folder} for {len(data)} bytes",
                    hint="Everything recorded before is intact: free some space and resume the run.",
                ) from error
            raise
        return digest

    def get(self, digest: str) -> bytes:
        """Return the bytes of ``digest``. Raises :class:`BlobMissing` if they are absent or damaged."""
        try:
            data = self._path(digest).read_bytes()
        except FileNotFoundError as error:
            raise BlobMissing(f"there is no blob {digest} in {self.folder}") from error
        if hashlib.blake2b(data, digest_size=16).hexdigest() != digest:
            raise BlobMissing(f"blob {digest} in {self.folder} is damaged")
        return data

    def __contains__(self, digest: str) -> bool:
        return self._path(digest).exists()

    def _path(self, digest: str) -> Path:
        if len(digest) != 32 or not all(c in "0123456789abcdef" for c in digest):
            raise BlobMissing(f"{digest!r} is not the name of a blob")
        return self.folder / digest[:2] / digest


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
