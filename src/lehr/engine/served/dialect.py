"""How one kind of server is spoken to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from lehr.core.trace import Completion, Sampling, Version
from lehr.engine.base import EngineError, InFlight


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may be. length: tokens of prompt and completion together. vocabulary: ids from 0."""

    length: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class Gauges:
    """What the server says of itself. held, total: blocks of keys and values. steps: forward passes, drafted,
    accepted: tokens of speculative decoding, all since it started, 0 where it does not count them.
    """

    running: int
    waiting: int
    held: int
    total: int
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


class Dialect(Protocol):
    """Turns calls into requests and answers into our types. Holds no state of requests."""

    name: str

    def refuse(self, sampling: Sampling) -> None:
        """Raise :class:`Unsupported` naming the first option that the server cannot serve truthfully."""
        ...

    async def complete(
        self, request_id: str, tokens: Sequence[int], sampling: Sampling, version: Version, timeout_s: float
    ) -> Completion:
        """Return a completion. ``version`` seeds the prefix cache, so that older blocks cannot be hit."""
        ...

    async def score(self, request_id: str, tokens: Sequence[int], temperature: float) -> NDArray[np.float32]:
        """Return float32[T-1], or raise :class:`Unsupported`."""
        ...

    async def pause(self) -> None:
        """Return once no step is under way; requests stay where they are."""
        ...

    async def resume(self) -> None:
        """Go on."""
        ...

    async def load(self, folder: Path, version: Version, in_flight: InFlight, *, busy: bool) -> None:
        """Put the weights of ``folder`` in force, as ``version``, and leave the server paused.

        busy: whether requests may be running. Raises :class:`EngineError` unless the server then reports
        ``version``, and unless its prefix cache is empty or, with ``keep``, in use by requests that keep it.
        """
        ...

    async def flush(self) -> None:
        """Empty the prefix cache, or raise :class:`EngineError`."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; ids that the server does not know are no error here."""
        ...

    async def gauges(self) -> Gauges:
        """Return what the server says of itself."""
        ...

    async def close(self) -> None:
        """Close connections."""
        ...


def parsed(label: str) -> Version:
    """Invert ``str(version)``."""
    incarnation, dot, n = label.partition(".")
    if not (dot and incarnation.isdigit() and n.isdigit()):
        raise EngineError(f"the server names its weights {label!r}", expected="INCARNATION.N, for example 1.0")
    return Version(int(incarnation), int(n))


def versions_of(spans: object, count: int) -> NDArray[np.int64]:
    """Return the packed version of each of ``count`` tokens from spans ``{version, start, end}``.

    Raises :class:`EngineError` unless they cover every token once, in order.
    """
    packed = np.empty(count, np.int64)
    reached = 0
    for span in cast("list[dict[str, Any]]", spans if isinstance(spans, list) else []):
        start, end = int(span["start"]), int(span["end"])
        if start != reached or end < start:
            break
        packed[start:end] = parsed(str(span["version"])).packed
        reached = end
    if reached != count:
        raise EngineError(
            f"the server gave the versions {spans!r:.200} for {count} tokens",
            expected="one version for each token",
        )
    return packed
