"""Files of segments, in a folder of this engine's own that nobody else may read.

They hold a cache and nothing more: they go when the engine closes, and what a killed engine left is swept by
the next one that starts in the same place. Files are read whole rather than mapped, because a mapped file that
somebody truncates kills the process that touches it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from lehr.core.errors import ConfigError

PREFIX = "lehr-kv-"
LOCK = "lock"
YOUNG_S = 10.0


class SegmentFolder:
    """Makes, reads and removes files. :meth:`close` removes the folder. Methods raise ``OSError``."""

    def __init__(self, parent: Path) -> None:
        try:
            parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _sweep(parent)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._lock = _locked(self.path / LOCK)
        except OSError as error:
            raise ConfigError(
                f"cannot keep keys and values in {parent}: {error.strerror or error}",
                expected="a folder that this user can write to",
                hint="Set tier_folder to another place, or tier_disk_bytes to 0.",
            ) from error

    def write(self, name: bytes, packed: bytes) -> None:
        """Write a file, readable by this user only. One that could not be written whole is not left behind."""
        path = self._file(name)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                view = memoryview(packed)
                while view:
                    view = view[file.write(view) :]
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def read(self, name: bytes) -> bytes:
        """Return a file's bytes."""
        descriptor = os.open(self._file(name), os.O_RDONLY | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            return file.readall()

    def remove(self, names: Iterable[bytes]) -> None:
        """Remove files, if they are there."""
        for name in names:
            self._file(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything. Idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _file(self, name: bytes) -> Path:
        return self.path / f"{name.hex()}.kv"


def _locked(path: Path) -> int:
    """Create and lock a file; the lock ends with the process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _sweep(parent: Path) -> None:
    """Remove folders of this user whose engine is gone."""
    for folder in parent.glob(f"{PREFIX}*"):
        found = folder.lstat()
        young = time.time() - found.st_mtime < YOUNG_S  # perhaps being made: not locked yet
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or young:
            continue
        try:
            descriptor = _locked(folder / LOCK)
        except OSError:
            continue  # its engine lives
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
