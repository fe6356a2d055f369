"""Numbers in the text exposition format of Prometheus (version 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Samples = Iterable[tuple[Mapping[str, str], float]]
"""Labels and a value, one pair per line."""


def family(name: str, kind: str, text: str, samples: Samples, *, suffix: str = "") -> Iterator[str]:
    """Yield the lines of one metric: its help, its kind, and each sample."""
    yield f"# HELP {name} {text}."
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield sample(name + suffix, labels, value)


def sample(name: str, labels: Mapping[str, str], value: float) -> str:
    """Return one line. Whole numbers are written out, however large."""
    shown = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
    number = str(int(value)) if float(value).is_integer() else f"{value:.9g}"
    return f"{name}{{{shown}}} {number}" if shown else f"{name} {number}"


class Histogram:
    """Counts of observations below rising bounds, in seconds."""

    def __init__(self, name: str, text: str, bounds: Iterable[float]) -> None:
        self.name, self.text = name, text
        self._bounds = tuple(sorted(bounds))
        self._counts = [0] * len(self._bounds)
        self._total, self._sum = 0, 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._total += 1
        self._sum += value
        for i, bound in enumerate(self._bounds):
            if value <= bound:
                self._counts[i] += 1

    def lines(self) -> Iterator[str]:
        """Yield the exposition; buckets are cumulative."""
        buckets = [({"le": f"{b:g}"}, float(c)) for b, c in zip(self._bounds, self._counts, strict=True)]
        buckets.append(({"le": "+Inf"}, float(self._total)))
        yield from family(self.name, "histogram", self.text, buckets, suffix="_bucket")
        yield sample(f"{self.name}_sum", {}, self._sum)
        yield sample(f"{self.name}_count", {}, self._total)


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
