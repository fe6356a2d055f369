"""From the results of runs to means with intervals."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.asynchrony.arms import Arm, Sizes
from studies.asynchrony.runs import result_of

from lehr.evals.stats import Paired, paired_difference

T_975 = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""The 97.5 % point of Student's t, by degrees of freedom."""

Run = Mapping[str, Any]
Rate = Callable[[Run, int], float]
"""From a run and a step to a number."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The mean over ``n`` seeds, with Student's 95 % interval; without one (NaN) for fewer than three: the
    spread of two says next to nothing, and is 0 by chance.
    """

    mean: float
    low: float
    high: float
    n: int


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean ± t(n-1) s/√n."""
    n = len(values)
    if n == 0:
        return Estimate(math.nan, math.nan, math.nan, 0)
    mean = math.fsum(values) / n
    if n < 3:
        return Estimate(mean, math.nan, math.nan, n)
    variance = math.fsum((v - mean) ** 2 for v in values) / (n - 1)
    half = T_975[n - 1] * math.sqrt(variance / n)
    return Estimate(mean, mean - half, mean + half, n)


def load(sizes: Sizes, arms: Sequence[Arm], data: Path) -> dict[str, dict[int, Run]]:
    """Return the runs that are there, by arm and seed, each with what its start solved greedily."""
    found: dict[str, dict[int, Run]] = {}
    for seed in sizes.seeds:
        for arm in arms:
            run = result_of(sizes, arm, seed, data)
            if run is not None:
                found.setdefault(arm.name, {})[seed] = {**run, "evaluations": carried(run["evaluations"])}
    return found


def carried(evaluations: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measurements, where a run ended early with its last one for those that never came: its weights
    do not change any more.
    """
    found: dict[str, Any] = {}
    last: Any = {}
    for step in sorted(evaluations, key=int):
        last = evaluations[step] or last
        found[step] = last
    return found


def measured_steps(runs: Mapping[int, Run]) -> list[int]:
    """Return the steps at which every run was measured."""
    common = set.intersection(*(set(run["evaluations"]) for run in runs.values()))
    return sorted(int(step) for step in common)


def pass_rate(run: Run, step: int, domains: Collection[str] = ()) -> float:
    """Return the mean over domains of the share of tasks solved, of all domains or of those named."""
    rates = [
        tasks.count("1") / judged
        for domain, tasks in run["evaluations"][str(step)].items()
        if (not domains or domain in domains) and (judged := len(tasks) - tasks.count("-"))
    ]
    return math.fsum(rates) / len(rates) if rates else math.nan


def gain(run: Run, step: int, domains: Collection[str] = ()) -> float:
    """Return how much more is solved after ``step`` than before the first: seeds start differently."""
    return pass_rate(run, step, domains) - pass_rate(run, 0, domains)


def over_curve(run: Run, domains: Collection[str] = ()) -> float:
    """Return the mean pass rate over all measurements but that of the start: how high and how early."""
    steps = [int(step) for step in run["evaluations"] if step != "0"]
    return math.fsum(pass_rate(run, step, domains) for step in steps) / len(steps)


def between_seeds(
    runs: Mapping[int, Run], control: Mapping[int, Run], value: Callable[[Run], float]
) -> Estimate:
    """Return the difference to the control, paired by seed."""
    return estimate([value(runs[seed]) - value(control[seed]) for seed in sorted(runs.keys() & control.keys())])


def between_tasks(runs: Mapping[int, Run], control: Mapping[int, Run], step: int) -> Paired:
    """Return the difference to the control at ``step``, paired by seed and task. Its interval is about other
    tasks for these very runs: that another run of the same arm ends elsewhere is not in it.
    """
    strata: dict[str, str] = {}

    def outcomes(of: Mapping[int, Run]) -> dict[str, float]:
        found: dict[str, float] = {}
        for seed in runs.keys() & control.keys():
            for domain, tasks in of[seed]["evaluations"][str(step)].items():
                for number, outcome in enumerate(tasks):
                    if outcome != "-":
                        key = f"{seed}/{domain}/{number}"
                        found[key] = float(outcome == "1")
                        strata[key] = f"{seed}/{domain}"
        return found

    return paired_difference(outcomes(runs), outcomes(control), strata)


def step_mean(run: Run, name: str) -> float:
    """Return the mean of a number over the steps that told it."""
    told = [value for value in run["steps"][name] if value is not None]
    return math.fsum(told) / len(told) if told else math.nan


def seeds_mean(runs: Mapping[int, Run], value: Callable[[Run], float]) -> float:
    """Return a mean over seeds without an interval."""
    return math.fsum(value(run) for run in runs.values()) / len(runs) if runs else math.nan
