"""The numbers of a run: pass rates with intervals per domain and stage, and paired differences.

Pure: takes attempts, returns numbers. ``Summary.as_json`` is what stands in ``summary.json``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lehr.evals.stats import Paired, paired_difference, wilson
from lehr.rollout.base import Judged


@dataclass(frozen=True, slots=True)
class Attempt:
    """One held-out task under one stage's weights. ``valid`` is False when it could not be judged."""

    stage: str
    domain: str
    task_id: str
    passed: bool
    valid: bool
    judged: Judged


@dataclass(frozen=True, slots=True)
class Rate:
    """``passed`` of ``n`` judged tasks, and the 95 % Wilson interval of the rate as fractions."""

    n: int
    passed: int
    low: float
    high: float

    @property
    def rate(self) -> float:
        """The share that passed; 0 where nothing was judged."""
        return self.passed / self.n if self.n else 0.0


@dataclass(frozen=True, slots=True)
class Summary:
    """stages: per stage, a rate per domain. pooled: per stage, over all domains. paired: for "rl_minus_sft"
    and the like, pooled; paired_by_domain: the same for each domain.
    notes: what must be known beside the numbers.
    """

    stages: Mapping[str, Mapping[str, Rate]]
    pooled: Mapping[str, Rate]
    paired: Mapping[str, Paired]
    paired_by_domain: Mapping[str, Mapping[str, Paired]]
    seconds: Mapping[str, float]
    notes: Sequence[str] = ()

    @property
    def domains(self) -> list[str]:
        """The domains that were measured, in the order of the recipe."""
        return list(dict.fromkeys(domain for rates in self.stages.values() for domain in rates))

    def as_json(self) -> dict[str, Any]:
        """Return the content of ``summary.json``: counts as integers, rates and differences as fractions."""
        return {
            "stages": {
                stage: {
                    domain: {"n": r.n, "passed": r.passed, "low": round(r.low, 4), "high": round(r.high, 4)}
                    for domain, r in rates.items()
                }
                for stage, rates in self.stages.items()
            },
            "paired": {
                name: {"diff": round(d.diff, 4), "low": round(d.low, 4), "high": round(d.high, 4)}
                for name, d in self.paired.items()
            },
            "seconds": {name: round(value, 1) for name, value in self.seconds.items()},
        } | ({"notes": list(self.notes)} if self.notes else {})


def summarise(
    attempts: Sequence[Attempt],
    *,
    domains: Sequence[str],
    stages: Sequence[str],
    seconds: Mapping[str, float],
    pairs: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
) -> Summary:
    """Return the summary of ``attempts``. ``stages`` gives the order; those without attempts are left out.

    pairs: (after, before) names of stages to compare, task by task on the tasks that both have.
    """
    present = [stage for stage in stages if any(a.stage == stage for a in attempts)]
    by_stage = {
        stage: {domain: [a for a in attempts if (a.stage, a.domain) == (stage, domain)] for domain in domains}
        for stage in present
    }
    paired: dict[str, Paired] = {}
    by_domain: dict[str, dict[str, Paired]] = {}
    for after, before in pairs:
        if after not in present or before not in present:
            continue
        name = f"{after}_minus_{before}"
        found = {d: _difference(by_stage[after][d], by_stage[before][d]) for d in domains}
        by_domain[name] = {d: value for d, value in found.items() if value is not None}
        pooled = _difference(
            [a for part in by_stage[after].values() for a in part],
            [a for part in by_stage[before].values() for a in part],
        )
        if pooled is not None:
            paired[name] = pooled
    return Summary(
        stages={s: {d: _rate(part) for d, part in parts.items()} for s, parts in by_stage.items()},
        pooled={s: _rate([a for part in parts.values() for a in part]) for s, parts in by_stage.items()},
        paired=paired,
        paired_by_domain=by_domain,
        seconds=dict(seconds),
        notes=tuple(notes),
    )


def _rate(attempts: Sequence[Attempt]) -> Rate:
    valid = [a for a in attempts if a.valid]
    passed = sum(a.passed for a in valid)
    low, high = wilson(passed, len(valid))
    return Rate(len(valid), passed, low, high)


def _difference(after: Sequence[Attempt], before: Sequence[Attempt]) -> Paired | None:
    first = {a.task_id: float(a.passed) for a in before if a.valid}
    second = {a.task_id: float(a.passed) for a in after if a.valid}
    found = paired_difference(second, first, {a.task_id: a.domain for a in after})
    return found if found.n else None
