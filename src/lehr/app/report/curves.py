"""Reads ``metrics.jsonl``: series over steps, and where the time of a stage went."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Line:
    """What was measured at one step of one stage. A step repeated after a crash keeps its last values."""

    stage: str
    step: int
    values: Mapping[str, float]
    at: float = 0.0
    """Seconds since the epoch."""


def read_metrics(path: Path) -> list[Line]:
    """Return the lines in order of their first appearance. A line cut short by a crash is left out."""
    if not path.exists():
        return []
    merged: dict[tuple[str, int], dict[str, float]] = {}
    times: dict[tuple[str, int], float] = {}
    for text in path.read_text(errors="replace").splitlines():
        try:
            raw = json.loads(text)
        except ValueError:
            continue
        if not isinstance(raw, dict):
            continue
        row = cast("dict[str, Any]", raw)
        values = {
            name: float(value)
            for name, value in row.items()
            if name not in {"t", "stage", "step"} and isinstance(value, int | float)
        }
        key = (str(row.get("stage", "")), int(row.get("step", 0)))
        merged.setdefault(key, {}).update(values)
        times[key] = float(row.get("t", 0.0))
    return [Line(*key, values, times[key]) for key, values in merged.items()]


def series(lines: Sequence[Line], name: str) -> list[tuple[float, float]]:
    """Return (step, value) of one metric in order of steps."""
    found = [(float(line.step), line.values[name]) for line in lines if name in line.values]
    return sorted(found)


def names_under(lines: Sequence[Line], prefix: str) -> list[str]:
    """Return what follows ``prefix`` in the names of metrics, in order of first appearance."""
    found = {
        name.removeprefix(prefix): None for line in lines for name in line.values if name.startswith(prefix)
    }
    return list(found)


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds of one stage: how long it took, and how long each kind of work was under way. They overlap
    where sampling and training run at the same time.
    """

    stage: str
    wall_s: float
    sampling_s: float
    verifying_s: float
    training_s: float

    @property
    def idle_s(self) -> float:
        """Seconds during which certainly nothing of the three was under way: at least this many."""
        return max(0.0, self.wall_s - self.sampling_s - self.verifying_s - self.training_s)


def budgets(lines: Sequence[Line], seconds: Mapping[str, float]) -> list[Budget]:
    """Return the budget of every stage that has a duration, in order. What was measured inside a stage (its
    validation) is part of it.
    """
    found: list[Budget] = []
    for stage, wall in seconds.items():
        mine = [line for line in lines if line.stage in (stage, f"measure {stage} validation")]
        sums = {
            kind: sum(line.values.get(f"time/{kind}_s", 0.0) for line in mine)
            for kind in ("sampling", "verifying", "training")
        }
        found.append(Budget(stage, wall, sums["sampling"], sums["verifying"], sums["training"]))
    return found
