"""Charts as SVG files that stand alone: no script, no style sheet, light ground."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from studies.asynchrony.summary import Estimate

from lehr.app.report.svg import escaped, tag

WIDTH, HEIGHT = 420.0, 270.0
LEFT, RIGHT, TOP, BOTTOM = 44.0, 10.0, 44.0, 34.0
INK, FAINT = "#222", "#ddd"
COLOURS = ("#222222", "#1f77b4", "#2a9d4a", "#d1495b", "#8e5bb5", "#e08e0b")


@dataclass(frozen=True, slots=True)
class Curve:
    """A line with an interval at every point. colour: a number into :data:`COLOURS`."""

    label: str
    points: Sequence[tuple[float, Estimate]]
    colour: int
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. percent: whether values are differences of rates, told in points."""

    title: str
    curves: Sequence[Curve]
    percent: bool = True


def panels(parts: Sequence[Panel], x_label: str) -> str:
    """Return an SVG file with the panels side by side, those of rates on the same scale."""
    rates = [panel for panel in parts if panel.percent]
    shared = _range([curve for panel in rates for curve in panel.curves])
    body = "".join(
        tag(
            "g",
            _panel(panel, shared if panel.percent else _range(panel.curves), x_label),
            transform=f"translate({number * WIDTH:g} 0)",
        )
        for number, panel in enumerate(parts)
    )
    return _file(WIDTH * len(parts), HEIGHT, body, "; ".join(panel.title for panel in parts))


def dots(rows: Sequence[tuple[str, Estimate]], title: str, unit: str) -> str:
    """Return an SVG file of differences with whiskers, one row each, around a line at 0."""
    width, left, right, row, top = 760.0, 250.0, 80.0, 22.0, 40.0
    height = top + row * len(rows) + 30
    ends = [abs(v) for _, e in rows for v in (e.mean, e.low, e.high) if not math.isnan(v)]
    reach = min(max(ends, default=0.0) * 1.05, 0.5) or 0.1

    def at(value: float) -> float:
        return left + (min(max(value, -reach), reach) + reach) / (2 * reach) * (width - left - right)

    parts = [_text(10, 20, title, font_weight="bold")]
    for number in range(-2, 3):
        x, value = at(reach * number / 2), reach * number / 2
        parts.append(_line(x, top - 8, x, height - 26, INK if number == 0 else FAINT))
        parts.append(_text(x, height - 10, f"{value * 100:+.0f} {unit}", anchor="middle"))
    for number, (name, found) in enumerate(rows):
        y = top + row * number + row / 2
        parts.append(_text(left - 12, y + 4, name, anchor="end"))
        if not math.isnan(found.low):
            parts.append(_line(at(found.low), y, at(found.high), y, COLOURS[1], 2))
        parts.append(tag("circle", cx=at(found.mean), cy=y, r=4, fill=COLOURS[1]))
        parts.append(_text(width - right + 12, y + 4, f"{found.mean * 100:+.1f}"))
    return _file(width, height, "".join(parts), title)


def _range(curves: Sequence[Curve]) -> tuple[float, float]:
    values = [e.mean for curve in curves for _, e in curve.points if not math.isnan(e.mean)]
    low, high = min(values, default=0.0), max(values, default=1.0)
    room = (high - low) * 0.25 or 0.1
    return low - room, high + room


def _panel(panel: Panel, span: tuple[float, float], x_label: str) -> str:
    low, high = span
    xs = [x for curve in panel.curves for x, _ in curve.points]
    last = max(xs, default=1.0) or 1.0

    def at(x: float, y: float) -> tuple[float, float]:
        inside = min(max(y, low), high)
        across = LEFT + 8 + x / last * (WIDTH - LEFT - RIGHT - 16)
        return across, HEIGHT - BOTTOM - (inside - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [_text(LEFT, 16, panel.title, font_weight="bold")]
    for number in range(5):
        value = low + (high - low) * number / 4
        _, y = at(0, value)
        parts.append(_line(LEFT, y, WIDTH - RIGHT, y, FAINT))
        parts.append(
            _text(LEFT - 5, y + 4, f"{value * 100:+.0f}" if panel.percent else f"{value:.2g}", anchor="end")
        )
    for x in sorted(set(xs)) if len(set(xs)) < 12 else (0, last / 2, last):
        parts.append(_text(at(x, low)[0], HEIGHT - BOTTOM + 14, f"{x:g}", anchor="middle"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 5, x_label, anchor="middle"))
    for number, curve in enumerate(panel.curves):
        aside = (number - (len(panel.curves) - 1) / 2) * 3.0
        parts.append(
            _curve(curve, [(at(x, e.mean), at(x, e.low), at(x, e.high), e) for x, e in curve.points], aside)
        )
        x = LEFT + number * (WIDTH - LEFT - RIGHT) / len(panel.curves)
        parts.append(_line(x, 30, x + 14, 30, COLOURS[curve.colour], 2.5, curve.dashed))
        parts.append(_text(x + 18, 34, curve.label))
    return "".join(parts)


def _curve(curve: Curve, drawn: Sequence[tuple[tuple[float, float], ...]], aside: float) -> str:
    colour, parts = COLOURS[curve.colour], []
    line = " ".join(f"{middle[0] + aside:.1f},{middle[1]:.1f}" for middle, *_ in drawn)
    dash = "5 3" if curve.dashed else None
    parts.append(
        tag("polyline", points=line, fill="none", stroke=colour, stroke_width=1.8, stroke_dasharray=dash)
    )
    for (x, y), low, high, found in drawn:
        if not math.isnan(found.low):  # type: ignore[attr-defined]
            parts.append(_line(x + aside, low[1], x + aside, high[1], colour, 1, opacity=0.55))
        if len(drawn) < 12:
            parts.append(tag("circle", cx=x + aside, cy=y, r=2.6, fill=colour))
    return "".join(parts)


def _line(
    x1: float,
    y1: float,
    x2: float,
    y2: float,
    colour: str,
    width: float = 1,
    dashed: bool = False,
    **more: object,
) -> str:
    dash = "5 3" if dashed else None
    return tag(
        "line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour, stroke_width=width, stroke_dasharray=dash, **more
    )


def _text(x: float, y: float, content: str, anchor: str = "start", **more: object) -> str:
    return tag("text", escaped(content), x=x, y=y, text_anchor=anchor, fill=INK, **more)


def _file(width: float, height: float, body: str, label: str) -> str:
    ground = tag("rect", width=width, height=height, fill="#fff")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'role="img" aria-label="{escaped(label)}" font-family="sans-serif" font-size="11">'
        f"{ground}{body}</svg>\n"
    )
