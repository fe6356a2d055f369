"""How far the trainer's log-probabilities are from those that the sampler recorded, per domain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lehr.app.report.curves import Line, names_under, series

COLUMNS = ("mean", "median", "99th percentile", "largest", "divergence (k3)")
KINDS = ("abs", "abs_p50", "abs_p99", "abs_max", "kl")


@dataclass(frozen=True, slots=True)
class Agreement:
    """first: at the stage's first step, where both have the same weights: the values of ``COLUMNS``, in nats;
    None where an older run did not record one. all_steps: the mean over the steps' means.
    """

    stage: str
    domain: str
    first: tuple[float | None, ...]
    all_steps: float

    def as_row(self) -> dict[str, Any]:
        """Return a row of a table."""
        values = dict(zip(COLUMNS, self.first, strict=True)) | {"all steps": self.all_steps}
        told = {name: None if value is None else float(f"{value:.2g}") for name, value in values.items()}
        return {"domain": self.domain, "stage": self.stage, **told}


def read_agreement(lines: Sequence[Line]) -> list[Agreement]:
    """Return that of each stage and domain with a policy gradient, in order of first appearance."""
    found: list[Agreement] = []
    for stage in dict.fromkeys(line.stage for line in lines):
        for domain in names_under(lines, f"{stage}/mismatch_abs/"):
            values = [series(lines, f"{stage}/mismatch_{kind}/{domain}") for kind in KINDS]
            mean = [value for _, value in values[0]]
            first = tuple(points[0][1] if points else None for points in values)
            found.append(Agreement(stage, domain, first, sum(mean) / len(mean)))
    return found
