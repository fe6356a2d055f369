import errno
import os
from pathlib import Path

import pytest

from lehr.core.errors import OutOfSpace
from lehr.ledger.blobs import BlobMissing, BlobStore


def test_a_blob_is_named_by_its_content_and_stored_once(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "blobs")
    first, second = store.put(b"abc"), store.put(b"abc")
    assert first == second
    assert store.get(first) == b"abc"
    assert first in store
    assert store.put(b"") != first
    assert sorted(p.name for p in (tmp_path / "blobs").rglob("*") if p.is_file()) == sorted(
        [first, store.put(b"")]
    )


def test_a_damaged_or_absent_blob_is_named(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    digest = store.put(b"abc")
    (tmp_path / digest[:2] / digest).write_bytes(b"abd")
    with pytest.raises(BlobMissing, match="damaged"):
        store.get(digest)
    with pytest.raises(BlobMissing, match="no blob"):
        store.get("0" * 32)
    for name in ("../../etc/passwd", "", "A" * 32):
        with pytest.raises(BlobMissing, match="not the name"):
            store.get(name)


def test_a_full_disk_leaves_no_half_blob(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(tmp_path)
    kept = store.put(b"kept")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfSpace, match="intact"):
        store.put(b"lost")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [kept]
    assert store.get(kept) == b"kept"
