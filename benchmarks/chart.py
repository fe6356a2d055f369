"""Line charts as plain SVG, so that a result can be looked at anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

WIDTH, HEIGHT, LEFT, TOP, GAP = 640, 200, 60, 30, 80
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd")


@dataclass(frozen=True, slots=True)
class Line:
    """Values of one series; no label, no legend."""

    label: str
    values: Sequence[float]


def save(path: Path, axis: str, at: Sequence[float], panels: Mapping[str, Sequence[Line]]) -> None:
    """Write panels under each other over the same positions ``at``; each begins at 0."""
    parts: list[str] = []
    for number, (title, lines) in enumerate(panels.items()):
        top = TOP + number * (HEIGHT + GAP)
        parts += _panel(title, axis, at, lines, top)
    height = len(panels) * (HEIGHT + GAP)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _panel(title: str, axis: str, at: Sequence[float], lines: Sequence[Line], top: int) -> list[str]:
    right, bottom = WIDTH - 20, top + HEIGHT
    most = max(max(line.values) for line in lines) or 1.0
    last = max(at) or 1.0

    def place(x: float, y: float) -> str:
        return f"{LEFT + x / last * (right - LEFT):.1f},{bottom - y / most * HEIGHT:.1f}"

    parts = [f'<text x="{LEFT}" y="{top - 10}">{title}</text>']
    parts.append(f'<path d="M{LEFT} {top}V{bottom}H{right}" fill="none" stroke="black"/>')
    for tick in range(5):
        y = bottom - tick * HEIGHT // 4
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{most * tick / 4:.3g}</text>')
        x = LEFT + tick * (right - LEFT) // 4
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{last * tick / 4:.3g}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 32}" text-anchor="end">{axis}</text>')
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(place(x, y) for x, y in zip(at, line.values, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if line.label:
            y = top + 14 + 16 * number
            parts.append(f'<text x="{LEFT + 10}" y="{y}" fill="{colour}">{line.label}</text>')
    return parts
