"""The report as one page that needs nothing else: style, script and charts stand inside it.

What a model wrote is hostile: all text is escaped, and the page's own policy lets no script run but ours.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from lehr.app.meter import duration
from lehr.app.report.agreement import COLUMNS, read_agreement
from lehr.app.report.curves import Budget, Line, names_under, series
from lehr.app.report.summary import Attempt, Rate, Summary
from lehr.app.report.svg import Curve, Interval, escaped, interval_chart, line_chart, share_bar, tag
from lehr.app.report.table import difference_text, difference_title, rate_text, title_of
from lehr.app.report.transcript import Piece, Sample
from lehr.core.reward import Valid

COLOURS = tuple(f"--c{number}" for number in range(8))
WORK_COLOURS = {"sampling": "--c1", "verifying": "--c3", "training": "--c2"}


@dataclass(frozen=True, slots=True)
class Shown:
    """A sample with its transcripts as text."""

    sample: Sample
    before: Sequence[Piece]
    after: Sequence[Piece]


@dataclass(frozen=True, slots=True)
class Page:
    """Everything that the page shows."""

    title: str
    facts: Mapping[str, str]
    summary: Summary
    lines: Sequence[Line]
    budgets: Sequence[Budget]
    causes: Mapping[str, Mapping[str, Counter[str]]]
    """Per domain, per cause, how often each stage met it."""
    samples: Sequence[Shown]
    groups: Mapping[str, int]
    """What became of the groups that were drawn, by final state and reason."""
    recipe: Mapping[str, Any]


def render(page: Page) -> str:
    """Return the page as HTML."""
    assets = files("lehr.app.report") / "assets"
    style, script = ((assets / f"report.{kind}").read_text() for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    sections = (
        _rates(page.summary),
        _curves(page),
        _agreement(page),
        _time(page),
        _causes(page),
        _samples(page.samples),
        _recipe(page),
    )
    body = tag(
        "main",
        tag("header", tag("h1", escaped(page.title)) + '<button id="theme" type="button">light / dark</button>')
        + tag("div", "   ·   ".join(f"{escaped(k)} {escaped(v)}" for k, v in page.facts.items()), class_="soft")
        + _tiles(page.summary)
        + "".join(tag("p", f"<b>Note.</b> {escaped(note)}") for note in page.summary.notes)
        + "".join(sections),
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escaped(page.title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n"
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def stage_colours(stages: Sequence[str]) -> dict[str, str]:
    """Return a colour per stage; the well-known ones always have the same."""
    known = {"base": "--c0", "sft": "--c1", "rl": "--c2", "sft_more": "--c3"}
    spare = iter([c for c in COLOURS if c not in known.values()] * len(stages))
    return {stage: known.get(stage) or next(spare) for stage in stages}


def _section(title: str, lead: str, body: str) -> str:
    return (
        tag("section", tag("h2", escaped(title)) + tag("p", escaped(lead), class_="soft") + body)
        if body
        else ""
    )


def _tiles(summary: Summary) -> str:
    tiles = [
        tag(
            "div",
            f"<b>{rate.rate:.0%}</b>" + tag("span", escaped(f"{title_of(stage)}, {_range(rate)}")),
            class_="tile",
        )
        for stage, rate in summary.pooled.items()
        if rate.n
    ]
    for name, d in summary.paired.items():
        if name.endswith("_minus_base"):
            continue
        text = f"points, {difference_title(name)} ({d.low * 100:+.1f} to {d.high * 100:+.1f})"
        tiles.append(tag("div", f"<b>{d.diff * 100:+.1f}</b>" + tag("span", escaped(text)), class_="tile"))
    return tag("div", "".join(tiles), class_="tiles") if tiles else ""


def _range(rate: Rate) -> str:
    return f"{rate.low * 100:.0f}-{rate.high * 100:.0f} %"


def _rates(summary: Summary) -> str:
    colours = stage_colours(list(summary.stages))
    groups: dict[str, list[Interval]] = {}
    for domain in summary.domains:
        groups[domain] = [_interval(s, rates[domain], colours[s]) for s, rates in summary.stages.items()]
    if len(summary.domains) > 1:
        groups["all domains"] = [_interval(s, rate, colours[s]) for s, rate in summary.pooled.items()]
    if not groups:
        return ""
    head = "".join(tag("th", escaped(title_of(stage))) for stage in summary.stages)
    rows = [tag("tr", tag("th", "domain") + head)]
    for domain in summary.domains:
        cells = "".join(tag("td", escaped(rate_text(rates[domain]))) for rates in summary.stages.values())
        rows.append(tag("tr", tag("td", escaped(domain)) + cells))
    if len(summary.domains) > 1:
        cells = "".join(tag("td", escaped(rate_text(rate))) for rate in summary.pooled.values())
        rows.append(tag("tr", tag("td", "all") + cells, class_="total"))
    return _section(
        "Held-out tasks solved",
        "One greedy attempt at each task, judged by execution; tasks and templates that training never saw. "
        "Whiskers are 95 % Wilson intervals.",
        interval_chart(groups, "Pass rate per domain and stage")
        + tag("div", tag("table", "".join(rows)), class_="scroll", style="margin-top:14px")
        + _differences(summary),
    )


def _interval(stage: str, rate: Rate, colour: str) -> Interval:
    tip = f"{title_of(stage)}: {rate.passed} of {rate.n} solved, 95 % interval {_range(rate)}"
    return Interval(title_of(stage), rate.rate, rate.low, rate.high, colour, tip)


def _differences(summary: Summary) -> str:
    if not summary.paired:
        return ""
    domains = summary.domains
    head = "".join(tag("th", escaped(domain)) for domain in domains)
    rows = [tag("tr", tag("th", "paired difference, points") + head + tag("th", "all"))]
    for name, pooled in summary.paired.items():
        found = [summary.paired_by_domain.get(name, {}).get(domain) for domain in domains]
        cells = "".join(tag("td", escaped(difference_text(d, unit="") if d else "-")) for d in (*found, pooled))
        rows.append(tag("tr", tag("td", escaped(difference_title(name))) + cells))
    return tag("div", tag("table", "".join(rows)), class_="scroll", style="margin-top:18px")


def _curves(page: Page) -> str:
    figures: list[str] = []
    stages = list(dict.fromkeys(line.stage for line in page.lines))
    for stage in stages:
        lines = [line for line in page.lines if line.stage == stage]
        domains = list(page.recipe["domains"])
        colours = {name: COLOURS[1 + i % 7] for i, name in enumerate(domains)}
        for kind, caption in (
            ("pass", "pass rate of training attempts"),
            ("validation", "validation pass rate"),
            ("reward", "mean reward"),
            ("weight", "share of each domain"),
        ):
            found = [d for d in names_under(lines, f"{stage}/{kind}/") if d in colours]
            curves = [Curve(d, series(lines, f"{stage}/{kind}/{d}"), colours[d]) for d in found]
            percent = kind != "reward"
            figures.append(
                _figure(f"{stage}: {caption}", line_chart(curves, caption, percent=percent), colours)
            )
        for name in ("loss", "entropy", "staleness", "own_tokens", "grad_norm"):
            curve = Curve(name, series(lines, f"{stage}/{name}"), "--c1")
            if len(curve.points) > 1:
                shown = name.replace("_", " ")
                figures.append(_figure(f"{stage}: {shown}", line_chart([curve], shown), {}))
    return _section(
        "Learning curves",
        "Dots are single steps, lines their running mean over three; horizontal axes count optimiser steps.",
        tag("div", "".join(figures), class_="curves") if any(figures) else "",
    )


def _figure(caption: str, chart: str, colours: Mapping[str, str]) -> str:
    if not chart:
        return ""
    return tag("figure", tag("figcaption", escaped(caption)) + chart + _legend(colours))


def _legend(colours: Mapping[str, str]) -> str:
    items = "".join(
        tag("span", tag("i", style=f"background:var({colour})") + escaped(name))
        for name, colour in colours.items()
    )
    return tag("div", items, class_="legend") if items else ""


def _time(page: Page) -> str:
    if not page.budgets:
        return ""
    head = "".join(tag("th", name) for name in ("stage", "took", "sampling", "verifying", "training", "idle"))
    rows = [tag("tr", head + tag("th", "share of the stage"))]
    for budget in page.budgets:
        wall = budget.wall_s or 1.0
        known = budget.sampling_s + budget.verifying_s + budget.training_s > 0
        parts = {
            "sampling": budget.sampling_s,
            "verifying": budget.verifying_s,
            "training": budget.training_s,
        }
        cells = [tag("td", escaped(budget.stage)), tag("td", duration(budget.wall_s))]
        cells += [tag("td", duration(value) if known else "-") for value in (*parts.values(), budget.idle_s)]
        bars = "".join(
            share_bar([(kind, value / wall, WORK_COLOURS[kind])], f"{kind} in {budget.stage}")
            for kind, value in parts.items()
            if value > 0
        )
        cells.append(tag("td", bars, class_="wide"))
        rows.append(tag("tr", "".join(cells)))
    total = sum(budget.wall_s for budget in page.budgets)
    rows.append(tag("tr", tag("td", "all") + tag("td", duration(total)) + "<td></td>" * 5, class_="total"))
    return _section(
        "Where the time went",
        "Seconds during which each kind of work was under way. They may overlap; idle is the least that "
        "none of them can have covered.",
        _legend(WORK_COLOURS) + tag("div", tag("table", "".join(rows)), class_="scroll"),
    )


def _agreement(page: Page) -> str:
    titles = ("domain", *(f"first step: {name}" for name in COLUMNS), "all steps: mean")
    rows = [tag("tr", "".join(tag("th", title) for title in titles))]
    for found in read_agreement(page.lines):
        name = found.domain if found.stage == "rl" else f"{found.domain} ({found.stage})"
        told = ("-" if value is None else f"{value:.2g}" for value in (*found.first, found.all_steps))
        rows.append(tag("tr", tag("td", escaped(name)) + "".join(tag("td", text) for text in told)))
    return _section(
        "Trainer against sampler",
        "Distance of a token's log-probability as the trainer computes it from what the sampler recorded, in "
        "nats. At the first step both have the same weights, and what is left is arithmetic.",
        tag("div", tag("table", "".join(rows)), class_="scroll") if len(rows) > 1 else "",
    )


def _causes(page: Page) -> str:
    stages = list(page.summary.stages)
    parts: list[str] = []
    for domain, causes in page.causes.items():
        rows = [
            tag("tr", tag("th", escaped(domain)) + "".join(tag("th", escaped(title_of(s))) for s in stages))
        ]
        for why, counts in causes.items():
            cells = "".join(tag("td", str(counts.get(stage, 0))) for stage in stages)
            rows.append(tag("tr", tag("td", escaped(why)) + cells))
        if len(rows) > 1:
            parts.append(tag("div", tag("table", "".join(rows)), class_="scroll", style="margin-top:10px"))
    if page.groups:
        rows = [tag("tr", tag("th", "groups drawn for reinforcement learning") + tag("th", "number"))]
        rows += [tag("tr", tag("td", escaped(n)) + tag("td", str(c))) for n, c in page.groups.items()]
        parts.append(tag("div", tag("table", "".join(rows)), class_="scroll", style="margin-top:18px"))
    return _section(
        "Failures by cause",
        "Held-out attempts that did not pass. What could not be judged counts in no rate.",
        "".join(parts),
    )


def _samples(samples: Sequence[Shown]) -> str:
    parts: list[str] = []
    for shown in samples:
        sample = shown.sample
        name = "solved" if sample.good else "still failing"
        head = tag("span", name, class_=f"verdict {'passed' if sample.good else 'failed'}")
        label = f"{head} {escaped(sample.domain)} {tag('code', escaped(sample.after.task_id))}"
        sides = _side("before", sample.before, shown.before) if sample.before else ""
        sides += _side("after", sample.after, shown.after)
        shown_first = None if any(parts) or not sample.good else "open"
        parts.append(tag("details", tag("summary", label) + tag("div", sides, class_="pair"), open=shown_first))
    return _section(
        "Transcripts",
        "The same held-out tasks before and after training, good and bad. What the model wrote is shaded.",
        "".join(parts),
    )


def _side(name: str, attempt: Attempt, pieces: Sequence[Piece]) -> str:
    reward = attempt.judged.reward
    if isinstance(reward, Valid):
        detail = ", ".join(f"{part} {value:.2f}" for part, value in reward.parts.items())
        word = "passed" if reward.passed else "failed"
        verdict = tag(
            "span", escaped(f"{word}, reward {reward.value:.2f} ({detail})"), class_=f"verdict {word}"
        )
    else:
        verdict = tag(
            "span", escaped(f"not judged: {reward.reason} {reward.detail}"), class_="verdict unjudged"
        )
    text = "".join(tag("span", escaped(piece.text), class_=piece.speaker) for piece in pieces)
    return tag("div", f"<b>{escaped(name)}</b> {verdict}" + tag("pre", text))


def _recipe(page: Page) -> str:
    text = json.dumps(page.recipe, indent=2)
    return _section(
        "Recipe",
        "The resolved configuration of this run.",
        tag("details", tag("summary", "show") + tag("pre", escaped(text))),
    )
