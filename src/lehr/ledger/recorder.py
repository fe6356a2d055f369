"""The ledger as a ``core.protocols.Recorder``: events are kept in memory and written in one transaction."""

from __future__ import annotations

from collections import deque
from typing import Any

from lehr.ledger.store import Ledger


class LedgerRecorder:
    """Hands events of components to the ledger. :meth:`record` never blocks and never raises; its owner
    calls :meth:`flush` from time to time and at the end.

    limit: events kept between two flushes; beyond it the oldest are dropped, and their number is recorded.
    """

    def __init__(self, ledger: Ledger, *, limit: int = 10_000) -> None:
        self._ledger = ledger
        self._kept: deque[tuple[str, dict[str, Any]]] = deque(maxlen=limit)
        self._dropped = 0

    def record(self, kind: str, /, **fields: Any) -> None:
        """Keep one event for the next flush."""
        if len(self._kept) == self._kept.maxlen:
            self._dropped += 1
        self._kept.append((kind, fields))

    def flush(self) -> int:
        """Write what is kept and return how many events that were. What cannot be written stays."""
        written = len(self._kept)
        if not written:
            return 0
        with self._ledger.together():
            for kind, fields in self._kept:
                self._ledger.event(kind, **fields)
            if self._dropped:
                self._ledger.event("recorder.dropped", count=self._dropped)
        self._kept.clear()
        self._dropped = 0
        return written
