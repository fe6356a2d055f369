"""What is kept in which tier, and how it moves down.

A segment is queued by the engine, packed by a thread into compressed memory, and written to a file when memory
is over its bound; when the files are over theirs, those used longest ago go. The queue is bounded: what it has
no room for is not kept, so the engine never waits. A segment can be read in every state: while it is queued
from the bytes it was queued with, while it is being written from memory. A file counts only once it is whole,
every read checks the checksum, and what fails is forgotten, logged and computed again.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lehr.engine.base import TierStats
from lehr.engine.native.tiers.codec import Bytes, Damaged, pack, unpack
from lehr.engine.native.tiers.folder import SegmentFolder

log = logging.getLogger(__name__)

Tier = Literal["memory", "disk"]
QUEUE_BYTES = 256 << 20
"""Bytes of segments that wait to be packed."""
JOIN_S = 30.0


@dataclass(slots=True)
class _Entry:
    """One segment. It has ``raw`` while it is queued, ``packed`` while it is in memory, else a file."""

    raw_bytes: int
    raw: Bytes | None
    packed: bytes | None = None
    packed_bytes: int = 0
    tier: Tier = "memory"


class Tiers:
    """Safe to use from several threads. :meth:`close` ends the thread and removes the files."""

    def __init__(self, memory_bytes: int, disk_bytes: int, folder: Path | None, item_bytes: int) -> None:
        self._memory_limit, self._disk_limit, self._item_bytes = memory_bytes, disk_bytes, item_bytes
        self._folder = SegmentFolder(folder) if folder is not None and disk_bytes else None
        self._changed = threading.Condition()
        self._queue: OrderedDict[bytes, _Entry] = OrderedDict()
        self._memory: OrderedDict[bytes, _Entry] = OrderedDict()
        self._disk: OrderedDict[bytes, _Entry] = OrderedDict()
        self._bytes = {"queue": 0, "memory": 0, "disk": 0}
        self._writing = 0
        self._damaged = self._dropped = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kv-tiers", daemon=True)
        self._thread.start()

    def find(self, name: bytes) -> tuple[Tier, int] | None:
        """Return where a segment is and its size when loaded, or None."""
        with self._changed:
            entry = self._entry(name)
            return None if entry is None else (entry.tier, entry.raw_bytes)

    def store(self, name: bytes, raw: Bytes) -> bool:
        """Queue a segment, whose bytes must not change any more. Return False where there is no room."""
        with self._changed:
            if self._closed or self._entry(name) is not None:
                return True
            if self._queue and self._bytes["queue"] + raw.nbytes > QUEUE_BYTES:
                return False
            self._queue[name] = _Entry(raw.nbytes, raw)
            self._bytes["queue"] += raw.nbytes
            self._changed.notify_all()
            return True

    def read(self, name: bytes) -> tuple[Tier, Bytes] | None:
        """Return a segment's bytes and where they came from; None if it is not there, or not as it was
        stored.
        """
        with self._changed:
            entry = self._entry(name)
            if entry is None:
                return None
            raw, packed, tier = entry.raw, entry.packed, entry.tier
            for kept in (self._memory, self._disk):
                if name in kept:
                    kept.move_to_end(name)
        if raw is not None:
            return tier, raw
        try:
            if packed is None:
                packed = self._files.read(name)
            return tier, unpack(name, packed, entry.raw_bytes, self._item_bytes)
        except (OSError, Damaged) as error:
            self._lose(name, entry, error)
            return None

    def remove(self, names: Iterable[bytes]) -> None:
        """Forget segments."""
        with self._changed:
            gone = [name for name in names if self._take(name) == "disk"]
        self._unlink(gone)

    def flush(self) -> None:
        """Forget everything."""
        with self._changed:
            names = [*self._queue, *self._memory, *self._disk]
        self.remove(names)

    def drain(self, timeout_s: float = 60.0) -> bool:
        """Wait until nothing is queued or being written; return whether that came to be."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._writing, timeout_s)

    def stats(self) -> TierStats:
        """Return what this class counts."""
        with self._changed:
            sizes = self._bytes
            return TierStats(
                queued_bytes=sizes["queue"],
                memory_bytes=sizes["memory"],
                disk_bytes=sizes["disk"],
                damaged=self._damaged,
                dropped=self._dropped,
            )

    def close(self) -> None:
        """End the thread and remove the files. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(JOIN_S)
        self.flush()
        if self._folder is not None:
            self._folder.close()

    @property
    def _files(self) -> SegmentFolder:
        if self._folder is None:
            raise FileNotFoundError("there is no tier on disk")
        return self._folder

    def _entry(self, name: bytes) -> _Entry | None:
        return self._queue.get(name) or self._memory.get(name) or self._disk.get(name)

    def _take(self, name: bytes) -> str | None:
        """Take an entry out of the books; return which one it was in. Needs the lock."""
        if (entry := self._queue.pop(name, None)) is not None:
            self._bytes["queue"] -= entry.raw_bytes
            return "queue"
        for where, kept in (("memory", self._memory), ("disk", self._disk)):
            if (entry := kept.pop(name, None)) is not None:
                self._bytes[where] -= entry.packed_bytes
                return where
        return None

    def _lose(self, name: bytes, entry: _Entry, error: Exception) -> None:
        with self._changed:
            if self._entry(name) is not entry:
                return  # it was removed while it was being read
            self._take(name)
            self._damaged += 1
        log.warning("Keys and values are computed again: segment %s is lost: %s", name.hex(), error)
        self._unlink([name])

    def _unlink(self, names: Iterable[bytes]) -> None:
        if self._folder is not None:
            try:
                self._folder.remove(names)
            except OSError as error:
                log.warning("A file of keys and values could not be removed: %s", error)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                name, entry = next(iter(self._queue.items()))
                self._writing += 1
            try:
                self._pack(name, entry)
                self._move_down()
            except Exception:  # the boundary: a cache that fails costs time, never an answer
                log.exception("A segment of keys and values was not kept")
                self.remove([name])
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    def _pack(self, name: bytes, entry: _Entry) -> None:
        if entry.raw is None:
            return
        packed = pack(name, entry.raw, self._item_bytes)
        with self._changed:
            if self._queue.get(name) is not entry:
                return  # removed meanwhile
            self._take(name)
            entry.raw, entry.packed, entry.packed_bytes = None, packed, len(packed)
            self._memory[name] = entry
            self._bytes["memory"] += len(packed)

    def _move_down(self) -> None:
        """Bring both tiers under their bounds."""
        while True:
            with self._changed:
                if self._bytes["memory"] <= self._memory_limit:
                    return
                name, entry = next(iter(self._memory.items()))
                fits = self._folder is not None and entry.packed_bytes <= self._disk_limit
                if not fits:
                    self._take(name)
                    self._dropped += 1
                    continue
                packed, gone = entry.packed, []
                while self._bytes["disk"] + entry.packed_bytes > self._disk_limit:
                    gone.append(next(iter(self._disk)))
                    self._take(gone[-1])
                    self._dropped += 1
            self._unlink(gone)
            if packed is not None:
                self._to_disk(name, entry, packed)

    def _to_disk(self, name: bytes, entry: _Entry, packed: bytes) -> None:
        try:
            self._files.write(name, packed)
        except OSError as error:
            log.warning("A segment of keys and values was not kept: %s", error)
            self.remove([name])
            return
        with self._changed:
            if self._memory.get(name) is entry:
                self._take(name)
                entry.packed, entry.tier = None, "disk"
                self._disk[name] = entry
                self._bytes["disk"] += entry.packed_bytes
                return
        self._unlink([name])
