"""Protocols that packages depend on instead of on each other."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Recorder(Protocol):
    """Where a component reports what it did. ``sandbox``, ``verify``, ``engine`` and ``train`` know only
    this, never the ledger.
    """

    def record(self, kind: str, /, **fields: Any) -> None:
        """Record one event. Must not block and must not raise into the caller's work."""
        ...


class NullRecorder:
    """Records nothing; the default for stand-alone use."""

    def record(self, kind: str, /, **fields: Any) -> None:
        """Drop the event."""


class ListRecorder:
    """Keeps events in memory, for tests and for a later flush."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def record(self, kind: str, /, **fields: Any) -> None:
        """Append ``(kind, fields)``."""
        self.events.append((kind, fields))
