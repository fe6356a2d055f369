"""Numbers that a comparison stands on: intervals, paired differences, pass@k. All intervals are 95 %."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

Z_95 = 1.959963984540054
"""The 97.5 % point of the normal distribution."""


def wilson(passed: int, n: int, z: float = Z_95) -> tuple[float, float]:
    """Return the score interval of a proportion (Wilson 1927, JASA 22, 209-212); (0, 1) when ``n`` is 0.

    Centre ``(p + z²/2n) / (1 + z²/n)``, half width ``z √(p(1-p)/n + z²/4n²) / (1 + z²/n)``.
    """
    if not 0 <= passed <= n:
        raise ValueError(f"{passed} of {n} is not a proportion")
    if n == 0:
        return 0.0, 1.0
    p = passed / n
    scale = 1.0 + z * z / n
    centre = (p + z * z / (2 * n)) / scale
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
    low = 0.0 if passed == 0 else max(0.0, centre - half)
    high = 1.0 if passed == n else min(1.0, centre + half)
    return low, high


@dataclass(frozen=True, slots=True)
class Paired:
    """The mean of a minus b over ``n`` tasks that both were measured on, with its 95 % interval."""

    diff: float
    low: float
    high: float
    n: int


def paired_difference(
    a: Mapping[str, float], b: Mapping[str, float], strata: Mapping[str, str] | None = None
) -> Paired:
    """Return how much better ``a`` is than ``b`` on the tasks (keys) that both have.

    With d_i = a_i - b_i, the estimate is the mean of d and its standard error √(s²/n), s² the sample
    variance of d (n - 1): the normal approximation for paired samples (Agresti 2013, Categorical Data
    Analysis, section 11.1, for 0/1 outcomes). ``strata`` names the domain of each task; then tasks are
    pooled, and the variance is that of a stratified sample, Σ (n_h/n)² s_h²/n_h, since how many tasks each
    domain has is fixed. A variance of exactly 0 is replaced by that of one disagreement among n, 1/n, so
    that few tasks are never certain. With no common task the interval is (-1, 1).
    """
    tasks = sorted(a.keys() & b.keys())
    n = len(tasks)
    if n == 0:
        return Paired(0.0, -1.0, 1.0, 0)
    differences = {task: float(a[task]) - float(b[task]) for task in tasks}
    diff = math.fsum(differences.values()) / n
    by_stratum: dict[str, list[float]] = {}
    for task, value in differences.items():
        by_stratum.setdefault(strata[task] if strata is not None else "", []).append(value)
    variance = sum((len(d) / n) ** 2 * _sample_variance(d) / len(d) for d in by_stratum.values())
    if variance == 0.0:
        variance = 1.0 / n / n
    half = Z_95 * math.sqrt(variance)
    return Paired(diff, max(-1.0, diff - half), min(1.0, diff + half), n)


def pass_at_k(passed: int, n: int, k: int) -> float:
    """Return the unbiased estimate of pass@k from ``passed`` of ``n`` attempts (Chen et al. 2021, eq. 1).

    ``1 - C(n - c, k) / C(n, k)``: the chance that k attempts drawn without replacement hold a passing one.
    """
    if not 1 <= k <= n or not 0 <= passed <= n:
        raise ValueError(f"pass@{k} needs {k} attempts at least and a count of 0 to n; got {passed} of {n}")
    return 1.0 - math.comb(n - passed, k) / math.comb(n, k)


def _sample_variance(values: list[float]) -> float:
    """Return the unbiased variance; of a single value, the largest that a difference of rates can have."""
    if len(values) < 2:
        return 1.0
    mean = math.fsum(values) / len(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
