"""Published weights, laid out as the model folder that a server loads."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

from lehr.core.batch import Manifest
from lehr.core.trace import Version
from lehr.engine.base import EngineError
from lehr.model.checkpoint import file_digest

_KEPT = ("config.json", "generation_config.json")


class Fetched:
    """A folder for every version that was fetched and is not yet older than what runs.

    base: the model folder whose configuration the weights have. root: where to lay folders out; the server must
    see it under the same path. A temporary folder of this machine where none is named.
    """

    def __init__(self, base: Path, root: Path | None = None) -> None:
        self._base = base
        self._own = root is None
        self._root = Path(tempfile.mkdtemp(prefix="lehr-weights-")) if root is None else root
        self._folders: dict[Version, Path] = {}

    def __contains__(self, version: Version) -> bool:
        return version in self._folders

    async def add(self, manifest: Manifest) -> None:
        """Check a manifest's file and lay it out. Raises :class:`EngineError` if it is missing or damaged."""
        self._folders[manifest.version] = await asyncio.to_thread(self._lay_out, manifest)

    def folder(self, version: Version) -> Path:
        """Return where ``version`` lies."""
        return self._folders[version]

    def drop_before(self, version: Version) -> None:
        """Remove what is older than ``version``, which the server may read again."""
        for old in [v for v in self._folders if v < version]:
            shutil.rmtree(self._folders.pop(old), ignore_errors=True)

    def close(self) -> None:
        """Remove everything."""
        for folder in self._folders.values():
            shutil.rmtree(folder, ignore_errors=True)
        self._folders.clear()
        if self._own:
            shutil.rmtree(self._root, ignore_errors=True)

    def _lay_out(self, manifest: Manifest) -> Path:
        path = Path(manifest.path)
        if not path.exists():
            raise EngineError(f"weights {manifest.version} are not at {path}", expected="a published file")
        found = file_digest(path)
        if found != manifest.digest:
            raise EngineError(
                f"weights {manifest.version} at {path} have digest {found}", expected=manifest.digest
            )
        folder = self._root / f"weights-{manifest.version}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in _KEPT:
            if (self._base / name).exists():
                shutil.copyfile(self._base / name, folder / name)
        try:
            # The publisher may remove its own name of the file at any time.
            os.link(path.resolve(), folder / "model.safetensors")
        except OSError:
            shutil.copyfile(path, folder / "model.safetensors")
        return folder
