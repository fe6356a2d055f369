"""Writes the report: figures, and the part of the page that follows from the data; its prose stays as it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from studies.asynchrony.arms import LOUD, Arm, Sizes, arms
from studies.asynchrony.figures import Curve, Panel, dots, panels
from studies.asynchrony.summary import (
    Estimate,
    Rate,
    Run,
    between_seeds,
    between_tasks,
    estimate,
    gain,
    load,
    measured_steps,
    over_curve,
    pass_rate,
    seeds_mean,
    step_mean,
)

from lehr.pipeline.folder import replace_text

LAST = 8
"""Steps at the end whose mean entropy is told."""
BEGIN, END = "<!-- result:begin -->", "<!-- result:end -->"
Found = Mapping[str, Mapping[int, Run]]


def write_report(sizes: Sizes, docs: Path) -> None:
    """Write ``asynchrony.md`` and the figures beside the data, from what has been run so far."""
    known = arms()
    found = load(sizes, known, docs / "asynchrony")
    if not found:
        return
    for name, svg in _figures(found, sizes).items():
        replace_text(docs / "asynchrony" / name, svg)
    page = docs / "asynchrony.md"
    old = (
        page.read_text()
        if page.exists()
        else f"# Asynchrony, correction, scaling and replay\n\n{BEGIN}\n{END}\n"
    )
    before, _, rest = old.partition(BEGIN)
    after = rest.partition(END)[2]
    replace_text(page, f"{before}{BEGIN}\n{_body(found, known, sizes)}{END}{after}")


def _body(found: Found, known: Sequence[Arm], sizes: Sizes) -> str:
    absent = {arm.name: [s for s in sizes.seeds if s not in found.get(arm.name, {})] for arm in known}
    missing = [f"{name} (seeds {', '.join(map(str, seeds))})" for name, seeds in absent.items() if seeds]
    runs = [run for seeds in found.values() for run in seeds.values()]
    told = f"{len(runs)} of {len(known) * len(sizes.seeds)} runs are in."
    if missing:
        told += f" Missing: {', '.join(missing)}."
    steps, chosen = sizes.steps, [arm for arm in known if arm.name in found]
    parts = [
        told,
        "### Held-out tasks solved, by arm",
        _table(
            ("arm", "seeds", "steps trained", "start", f"after step {steps}", f"gain at step {steps}",
             "mean over the curve", "against", "difference of means", f"after step {steps}, paired by task"),
            [_row(arm, found, steps) for arm in chosen],
        ),
        "![Differences to the control](asynchrony/differences.svg)",
        "![Curves of arms with correction and of arms without](asynchrony/curves.svg)",
        "### How far off the policy the batches were",
        _table(
            ("arm", "lag in versions: share of attempts", "k3 per token", "effective samples", "bound acts on",
             "largest ratio", f"entropy, last {LAST} steps", "attempts sampled", "alarms"),
            [_health(arm.name, found[arm.name], sizes) for arm in chosen],
        ),
        "![Mismatch and entropy, step by step](asynchrony/health.svg)",
        "### By domain",
        _by_domain(found, chosen, sizes),
        "### The loud domain and the others",
        _loud(found, sizes),
        "![The loud domain and the others](asynchrony/loud.svg)",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _row(arm: Arm, found: Found, steps: int) -> tuple[str, ...]:
    runs, control = found[arm.name], found.get(arm.control, {})
    shared = runs.keys() & control.keys()
    compared = arm.name != arm.control and bool(shared)
    tasks = between_tasks(runs, control, steps) if compared else None
    return (
        arm.name,
        str(len(runs)),
        ", ".join(str(sum(value is not None for value in run["steps"]["entropy"])) for run in runs.values()),
        f"{seeds_mean(runs, lambda run: pass_rate(run, 0)):.1%}",
        f"{seeds_mean(runs, lambda run: pass_rate(run, steps)):.1%}",
        _points(estimate([gain(run, steps) for run in runs.values()])),
        f"{seeds_mean(runs, over_curve):.1%}",
        arm.control if compared else "",
        _points(between_seeds(runs, control, over_curve)) if compared else "",
        f"{tasks.diff * 100:+.1f} ({tasks.low * 100:+.1f} to {tasks.high * 100:+.1f})" if tasks else "",
    )


def _health(name: str, runs: Mapping[int, Run], sizes: Sizes) -> tuple[str, ...]:
    ages: dict[str, float] = {}
    alarms: dict[str, int] = {}
    for run in runs.values():
        for age, share in run["staleness"].items():
            ages[age] = ages.get(age, 0.0) + share / len(runs)
        for alarm, count in run["alarms"].items():
            alarms[alarm] = alarms.get(alarm, 0) + count
    mean: Callable[[str], float] = lambda key: seeds_mean(runs, lambda run: step_mean(run, key))  # noqa: E731
    entropy = seeds_mean(runs, lambda run: estimate(run["steps"]["entropy"][-LAST:]).mean)
    sampled = seeds_mean(runs, lambda run: sum(run["steps"]["groups_finished"]) * sizes.group_size)
    return (
        name,
        ", ".join(f"{age}: {share:.0%}" for age, share in sorted(ages.items(), key=lambda item: int(item[0]))),
        f"{mean('mismatch_kl'):.2g}",
        f"{mean('ess'):.0%}",
        f"{mean('clipped_up'):.1%} up, {mean('clipped_down'):.1%} down",
        f"{max(max(run['steps']['ratio_max'], default=math.nan) for run in runs.values()):.3g}",
        f"{entropy:.2f}",
        f"{sampled:.0f}",
        ", ".join(f"{alarm} {count}" for alarm, count in sorted(alarms.items())),
    )


def _loud(found: Found, sizes: Sizes) -> str:
    others = [name for name in sizes.domains if name != LOUD]
    rows = [
        (
            name,
            *(
                _points(estimate([gain(run, sizes.steps, of) for run in found[name].values()]))
                for of in ((LOUD,), others)
            ),
        )
        for name in ("sync", "unscaled", "loud-scaled", "loud-unscaled")
        if name in found
    ]
    return _table(("arm", f"gain of {LOUD.partition('/')[2]}", "gain of the others"), rows)


def _by_domain(found: Found, chosen: Sequence[Arm], sizes: Sizes) -> str:
    names = [name.partition("/")[2] for name in sizes.domains]
    rows = [("start", *_rates_of(found[chosen[0].name], 0, sizes))]
    rows += [(arm.name, *_rates_of(found[arm.name], sizes.steps, sizes)) for arm in chosen]
    return _table((f"arm, after step {sizes.steps}", *names), rows)


def _rates_of(runs: Mapping[int, Run], step: int, sizes: Sizes) -> list[str]:
    return [f"{seeds_mean(runs, lambda run, d=d: pass_rate(run, step, (d,))):.0%}" for d in sizes.domains]


def _figures(found: Found, sizes: Sizes) -> dict[str, str]:
    lags = (("sync", "lag 0", 0), ("async-1", "lag 1", 1), ("async-4", "lag 4", 2), ("async-8", "lag 8", 3))
    plain = partial(_curves, found)
    others = [name for name in sizes.domains if name != LOUD]
    loud = (("loud-scaled", "scaled", 1), ("loud-unscaled", "not scaled", 3))
    quiet = (("sync", "as it is, scaled", 0), ("unscaled", "as it is, not scaled", 5))
    known = [arm for arm in arms() if arm.name in found and arm.name != arm.control]
    rows = [
        (f"{arm.name} less {arm.control}", between_seeds(found[arm.name], found[arm.control], over_curve))
        for arm in known
        if found[arm.name].keys() & found.get(arm.control, {}).keys()
    ]
    title = LOUD.partition("/")[2]
    return {
        "curves.svg": panels(
            [
                Panel("Gain in points: dppo_tv", plain(lags, gain)),
                Panel("Gain in points: no correction", plain(_uncorrected(lags), gain)),
                Panel(
                    "Gain in points: replay",
                    plain((("sync", "without", 0), ("replay", "with", 4)), gain),
                ),
            ],
            "step",
        ),
        "loud.svg": panels(
            [
                Panel(
                    f"Gain in points: {title}, paid 100-fold",
                    plain((*loud, *quiet), partial(_of, (LOUD,))),
                ),
                Panel("Gain in points: the other domains", plain((*loud, *quiet), partial(_of, others))),
            ],
            "step",
        ),
        "health.svg": panels(
            [
                Panel("k3 per token, dppo_tv", _by_step(found, lags, "mismatch_kl"), percent=False),
                Panel("k3 per token, no correction", _by_step(found, _uncorrected(lags), "mismatch_kl"), False),
                Panel("entropy, dppo_tv", _by_step(found, lags, "entropy"), percent=False),
            ],
            "step",
        ),
        "differences.svg": dots(rows, "Difference of the curve's mean, 95 % over seeds", "pt"),
    }


def _uncorrected(lags: Sequence[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    return [(f"{name}-uncorrected", label, colour) for name, label, colour in lags]


def _of(domains: Collection[str], run: Run, step: int) -> float:
    return gain(run, step, domains)


def _curves(found: Found, chosen: Sequence[tuple[str, str, int]], rate: Rate) -> list[Curve]:
    drawn: list[Curve] = []
    for name, label, colour in chosen:
        runs = found.get(name)
        if runs:
            points = [
                (float(step), estimate([rate(run, step) for run in runs.values()]))
                for step in measured_steps(runs)
            ]
            drawn.append(Curve(label, points, colour))
    return drawn


def _by_step(found: Found, chosen: Sequence[tuple[str, str, int]], key: str) -> list[Curve]:
    drawn: list[Curve] = []
    for name, label, colour in chosen:
        runs = found.get(name, {})
        count = min((len(run["steps"][key]) for run in runs.values()), default=0)
        means = [seeds_mean(runs, lambda run, i=i: float(run["steps"][key][i] or 0.0)) for i in range(count)]
        points = [(i + 1.0, Estimate(mean, math.nan, math.nan, 1)) for i, mean in enumerate(means)]
        if points:
            drawn.append(Curve(label, points, colour))
    return drawn


def _points(found: Estimate) -> str:
    if math.isnan(found.low):
        return f"{found.mean * 100:+.1f}"
    return f"{found.mean * 100:+.1f} ({found.low * 100:+.1f} to {found.high * 100:+.1f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
