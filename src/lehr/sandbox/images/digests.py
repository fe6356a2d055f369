"""What names an image: everything that its build depends on, as far as it can be known beforehand."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from lehr.core.errors import ConfigError
from lehr.sandbox import image
from lehr.sandbox.images.declaration import OWN, Declared, is_archive
from lehr.sandbox.images.store import DIGITS

FORMAT = 2
"""Raised when the same declaration is built into something else than before."""


def of_host() -> str:
    """Return what names this host's system, as far as images depend on it: its interpreter."""
    return f"host {os.path.realpath(image.system_python() or '')}"


def of_root(root: Path) -> str:
    """Return what names a root folder: paths, kinds, modes, sizes and times, not contents. Below 100 ms for a
    small system.
    """
    digest = hashlib.sha256()
    for path, name in _walk(str(root), "", OWN):
        info = os.lstat(path)
        words = [name, info.st_mode]
        if stat.S_ISLNK(info.st_mode):
            words.append(os.readlink(path))
        elif not stat.S_ISDIR(info.st_mode):
            words += [info.st_size, info.st_mtime_ns]
        digest.update(repr(words).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:DIGITS]


def of_image(declared: Declared, ground: str) -> str:
    """Return what names a declared image on a ground of that digest. Raises ``ConfigError`` for a file of it
    that is not there.
    """
    layer = declared.layer
    files = {where: _of_content(declared, source) for where, source in layer.files.items()}
    archives = {entry: _of_content(declared, entry) for entry in layer.pip if is_archive(entry)}
    whole = {
        "format": FORMAT,
        "ground": ground,
        **layer.model_dump(mode="json", exclude={"base", "timeout"}),
        "files": list(files.items()),  # in order: a later one may stand in an earlier one's folder
        "archives": archives,
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:DIGITS]


def _of_content(declared: Declared, source: str) -> str:
    """Return the digest of a file, or of everything in a folder, with names and whether it can be run."""
    top = declared.source(source)
    if not top.exists():
        raise ConfigError(
            f"{declared.name} names {source!r}, which is not there",
            expected=f"a file or folder at {top}",
            hint=f"Put it there, or correct {declared.file}.",
        )
    try:
        return _of_tree(str(top))
    except OSError as error:
        raise ConfigError(
            f"{declared.name} names {source!r}, which cannot be read: {error}", expected="files of this user"
        ) from error


def _of_tree(top: str) -> str:
    digest = hashlib.sha256()
    for path, name in (*_walk(top, ""), (top, "")):
        info = os.lstat(path) if name else os.stat(path)
        if stat.S_ISLNK(info.st_mode):
            what = f"link {os.readlink(path)}"
        elif stat.S_ISREG(info.st_mode):
            with open(path, "rb") as handle:
                what = f"file {bool(info.st_mode & 0o111)} {hashlib.file_digest(handle, 'sha256').hexdigest()}"
        else:
            what = "folder"
        digest.update(repr((name, what)).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _walk(folder: str, name: str, without: frozenset[str] = frozenset()) -> Iterator[tuple[str, str]]:
    """Yield the path and the name of everything below a folder, in a fixed order. Follows no link; what is in a
    folder that this user may not read is left out.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except (NotADirectoryError, PermissionError):
        return
    for entry in entries:
        if entry.name in without:
            continue
        inner = f"{name}/{entry.name}" if name else entry.name
        yield entry.path, inner
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(entry.path, inner)
