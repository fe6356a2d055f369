"""Metrics as JSON lines, and how long each kind of work was under way."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

from lehr.core.clock import Clock, SystemClock


class MetricsWriter:
    """Appends one JSON object a line: ``t``, ``stage``, ``step`` and the values.

    A run that was killed in the middle of a line goes on with a fresh line.
    """

    def __init__(self, path: Path) -> None:
        broken = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._out = path.open("a", buffering=1)
        if broken:
            self._out.write("\n")

    def write(self, stage: str, step: int, values: Mapping[str, float]) -> None:
        """Append one line; values that are not finite are left out, since JSON cannot hold them."""
        kept = {name: float(f"{float(v):.9g}") for name, v in values.items() if math.isfinite(v)}
        self._out.write(json.dumps({"t": round(time.time(), 3), "stage": stage, "step": step, **kept}) + "\n")

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._out.close()


class BusyMeter:
    """Counts the seconds during which at least one piece of work was under way."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._total = 0.0
        self._depth = 0
        self._since = 0.0

    @contextmanager
    def __call__(self) -> Generator[None]:
        """Count the block as work."""
        if self._depth == 0:
            self._since = self._clock.now()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._total += self._clock.now() - self._since

    @property
    def seconds(self) -> float:
        """Seconds so far, work under way included."""
        running = self._clock.now() - self._since if self._depth else 0.0
        return self._total + running
