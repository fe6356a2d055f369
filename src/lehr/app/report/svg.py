"""Charts as inline SVG. Colours are CSS variables of the page, so that they follow light and dark.

Every text passes through :func:`escaped`: what a model wrote may stand in a label.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

_SHOWN_CONTROLS = "\n\t"


def visible(text: object) -> str:
    """Return ``text`` with control characters, and those that reorder or hide text, as visible escapes: what a
    model wrote must not steer a terminal or a page.
    """
    return "".join(
        ch
        if ch in _SHOWN_CONTROLS or unicodedata.category(ch) not in {"Cc", "Cf", "Cs", "Co"}
        else f"\\u{{{ord(ch):x}}}"
        for ch in str(text)
    )


def escaped(text: object) -> str:
    """Return ``text`` safe inside HTML, in an element or a quoted attribute."""
    return html.escape(visible(text), quote=True)


def tag(name: str, content: str = "", **attributes: object) -> str:
    """Return an element. ``content`` is markup already; attribute values are escaped. ``class_`` is class."""
    parts = [
        f' {key.rstrip("_").replace("_", "-")}="{escaped(_short(value))}"'
        for key, value in attributes.items()
        if value is not None
    ]
    return f"<{name}{''.join(parts)}>{content}</{name}>"


def _short(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def _text(x: float, y: float, content: object, **attributes: object) -> str:
    return tag("text", escaped(content), x=x, y=y, **attributes)


def _svg(width: float, height: float, body: str, label: str) -> str:
    return tag("svg", body, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=label, class_="chart")


@dataclass(frozen=True, slots=True)
class Interval:
    """A rate with its interval, all in [0, 1], and the text shown when the pointer rests on it."""

    label: str
    value: float
    low: float
    high: float
    colour: str
    tip: str


def interval_chart(groups: Mapping[str, Sequence[Interval]], label: str) -> str:
    """Return dots with whiskers from 0 to 100 %, one row an interval, groups one under the other."""
    width, left, right, row, gap, head = 860.0, 250.0, 56.0, 20.0, 16.0, 8.0
    plot = width - left - right
    height = head + sum(len(rows) * row + gap for rows in groups.values()) + 22
    parts: list[str] = []
    for tick in range(0, 101, 20):
        x = left + plot * tick / 100
        parts.append(tag("line", x1=x, x2=x, y1=head, y2=height - 22, class_="grid"))
        parts.append(_text(x, height - 6, f"{tick} %", text_anchor="middle", class_="tick"))
    y = head
    for name, rows in groups.items():
        middle = y + len(rows) * row / 2 + 4
        parts.append(_text(0.0, middle, name, class_="name"))
        for item in rows:
            parts.append(_whisker(item, left, plot, y + row / 2))
            y += row
        y += gap
    return _svg(width, height, "".join(parts), label)


def _whisker(item: Interval, left: float, plot: float, y: float) -> str:
    x, low, high = (left + plot * value for value in (item.value, item.low, item.high))
    stroke = f"stroke:var({item.colour})"
    return tag(
        "g",
        tag("title", escaped(item.tip))
        + tag("rect", x=left - 90, y=y - 10, width=plot + 140, height=20, class_="hit")
        + _text(left - 12, y + 4, item.label, text_anchor="end", class_="tick")
        + tag("line", x1=low, x2=high, y1=y, y2=y, style=f"{stroke};stroke-width:2.5;opacity:.55")
        + tag("line", x1=low, x2=low, y1=y - 4, y2=y + 4, style=f"{stroke};stroke-width:1.5")
        + tag("line", x1=high, x2=high, y1=y - 4, y2=y + 4, style=f"{stroke};stroke-width:1.5")
        + tag("circle", cx=x, cy=y, r=4.5, style=f"fill:var({item.colour})")
        + _text(left + plot + 10, y + 4, f"{item.value:.0%}", class_="value"),
    )


Place = Callable[[float, float], tuple[float, float]]
"""From a point of the data to one of the drawing."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart: (step, value) in order of steps."""

    label: str
    points: Sequence[tuple[float, float]]
    colour: str


def line_chart(
    curves: Sequence[Curve], label: str, *, percent: bool = False, smooth: int = 3, width: float = 420.0
) -> str:
    """Return raw points, faint, and their running mean over ``smooth`` points as a line."""
    drawn = [curve for curve in curves if curve.points]
    if not drawn:
        return ""
    height, left, right, top, bottom = 200.0, 46.0, 12.0, 10.0, 26.0
    xs = [x for curve in drawn for x, _ in curve.points]
    ys = [y for curve in drawn for _, y in curve.points]
    x0, x1 = min(xs), max(xs)
    y0, y1 = (0.0, 1.0) if percent else _span(min(ys), max(ys))

    def at(x: float, y: float) -> tuple[float, float]:
        across = 0.5 if x1 == x0 else (x - x0) / (x1 - x0)
        return left + across * (width - left - right), height - bottom - (y - y0) / (y1 - y0) * (
            height - top - bottom
        )

    parts: list[str] = []
    for number in range(5):
        value = y0 + (y1 - y0) * number / 4
        _, y = at(x0, value)
        shown = f"{value:.0%}" if percent else f"{value:.3g}"
        parts.append(tag("line", x1=left, x2=width - right, y1=y, y2=y, class_="grid"))
        parts.append(_text(left - 6, y + 4, shown, text_anchor="end", class_="tick"))
    for value in sorted({x0, round((x0 + x1) / 2), x1}):
        x, _ = at(value, y0)
        parts.append(_text(x, height - 8, f"{value:g}", text_anchor="middle", class_="tick"))
    for curve in drawn:
        parts.append(_curve(curve, at, percent, smooth))
    return _svg(width, height, "".join(parts), label)


def _curve(curve: Curve, place: Place, percent: bool, smooth: int) -> str:
    fill = f"fill:var({curve.colour})"
    dots: list[str] = []
    for x, y in curve.points:
        px, py = place(x, y)
        shown = f"{y:.1%}" if percent else f"{y:.4g}"
        tip = tag("title", escaped(f"{curve.label}: {shown} at step {x:g}"))
        dots.append(tag("circle", tip, cx=px, cy=py, r=2.6, style=f"{fill};opacity:.45"))
    means = running_mean([y for _, y in curve.points], smooth)
    path = " ".join(
        f"{'M' if i == 0 else 'L'}{px:.1f} {py:.1f}"
        for i, (px, py) in enumerate(place(x, m) for (x, _), m in zip(curve.points, means, strict=True))
    )
    line = tag("path", d=path, style=f"stroke:var({curve.colour});stroke-width:2;fill:none")
    return line + "".join(dots)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and up to ``window - 1`` values before it."""
    means: list[float] = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(sum(part) / len(part))
    return means


def _span(low: float, high: float) -> tuple[float, float]:
    if low == high:
        pad = abs(low) * 0.1 or 0.5
        return low - pad, high + pad
    pad = (high - low) * 0.08
    return (0.0 if 0 <= low <= (high - low) else low - pad), high + pad


def share_bar(shares: Sequence[tuple[str, float, str]], label: str) -> str:
    """Return one horizontal bar of (name, share in [0, 1], colour) pieces; what is left stays empty."""
    width, height = 600.0, 16.0
    x, parts = 0.0, [tag("rect", x=0, y=0, width=width, height=height, rx=3, class_="empty")]
    for name, share, colour in shares:
        part = max(0.0, min(share, 1.0)) * width
        tip = tag("title", escaped(f"{name}: {share:.0%}"))
        parts.append(tag("rect", tip, x=x, y=0, width=part, height=height, rx=3, style=f"fill:var({colour})"))
        x += part
    return _svg(width, height, "".join(parts), label)
