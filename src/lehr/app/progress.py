"""Live progress of a run: a display that redraws itself on a terminal, plain lines anywhere else.

Both implement the pipeline's ``Observer``. A fact whose name has a ``/`` is a domain's pass rate and is shown
on the domains' line; every other fact stands behind the bar. The fact ``seconds`` of a finished stage is how
long it took, where that is not the time since it began.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lehr.app.meter import Meter, duration, pace
from lehr.core.clock import Clock, SystemClock
from lehr.pipeline.observer import Fact, Observer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

PLAIN_EVERY_S = 5.0


def _facts(facts: Mapping[str, Fact]) -> str:
    return "  ".join(f"{name} {_value(value)}" for name, value in facts.items() if "/" not in name)


def _domains(facts: Mapping[str, Fact]) -> str:
    return "  ".join(f"{name} {_value(value)}" for name, value in facts.items() if "/" in name)


def _value(value: Fact) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


class _Work:
    """The stage under way."""

    def __init__(self, name: str, total: int | None, unit: str, clock: Clock) -> None:
        self.name = name
        self.unit = unit
        self.meter = Meter(total, clock)
        self.facts: dict[str, Fact] = {}

    def counts(self) -> str:
        if self.meter.total is None and not self.meter.done:
            return ""
        total = "" if self.meter.total is None else f"/{self.meter.total}"
        return f"{self.meter.done}{total} {self.unit}"

    def timing(self) -> str:
        rate, left = self.meter.rate, self.meter.left_s
        parts = [pace(rate, self.unit)] if rate is not None else []
        parts.append(
            f"{duration(left)} left" if left is not None else f"{duration(self.meter.elapsed_s)} so far"
        )
        return ", ".join(part for part in parts if part)


class PlainProgress:
    """One line at the borders of a stage, and at most one every few seconds inside it."""

    def __init__(self, console: Console, clock: Clock | None = None, every_s: float = PLAIN_EVERY_S) -> None:
        self._console = console
        self._clock = clock or SystemClock()
        self._begun = self._clock.now()
        self._every_s = every_s
        self._work: _Work | None = None
        self._printed_at = self._begun
        self._pending = False

    def stage(self, name: str, total: int | None, unit: str) -> None:
        """Begin a stage."""
        self._flush()
        self._work = _Work(name, total, unit, self._clock)
        self._print(f"{name}: {f'{total} {unit}' if total is not None else 'started'}")

    def advance(self, done: int, total: int | None = None, **facts: Fact) -> None:
        """Print a line if the last one is old enough."""
        if self._work is None:
            return
        self._work.meter.update(done, total)
        self._work.facts.update(facts)
        self._pending = True
        if self._clock.now() - self._printed_at >= self._every_s:
            self._flush()

    def note(self, text: str) -> None:
        """Print the note."""
        self._print(text)

    def finish(self, name: str, **facts: Fact) -> None:
        """Print how long the stage took."""
        self._flush()
        own = self._work is not None and self._work.name == name
        took_s = facts.pop("seconds", self._work.meter.elapsed_s if own and self._work else None)
        took = "" if took_s is None else f" in {duration(float(took_s))}"
        detail = "  ".join(part for part in (_facts(facts), _domains(facts)) if part)
        self._print(f"{name}: done{took}" + (f"  {detail}" if detail else ""))

    def _flush(self) -> None:
        work = self._work
        if work is None or not self._pending:
            return
        parts = [f"{work.name}: {work.counts()}", work.timing(), _facts(work.facts), _domains(work.facts)]
        self._print("  ".join(part for part in parts if part))
        self._pending = False

    def _print(self, text: str) -> None:
        self._printed_at = self._clock.now()
        stamp = duration(self._printed_at - self._begun)
        self._console.print(f"[{stamp:>6}] {text}", markup=False, highlight=False, soft_wrap=True)


class LiveProgress:
    """Finished stages, then the current one with its bar, redrawn in place four times a second."""

    def __init__(self, console: Console, clock: Clock | None = None) -> None:
        self._console = console
        self._clock = clock or SystemClock()
        self._begun = self._clock.now()
        self._work: _Work | None = None

    def stage(self, name: str, total: int | None, unit: str) -> None:
        """Begin a stage; the one before, if it never finished, is left as a line."""
        self._retire()
        self._work = _Work(name, total, unit, self._clock)

    def advance(self, done: int, total: int | None = None, **facts: Fact) -> None:
        """Move the bar."""
        if self._work is not None:
            self._work.meter.update(done, total)
            self._work.facts.update(facts)

    def note(self, text: str) -> None:
        """Print the note above the bar."""
        from rich.text import Text

        self._console.print(Text.assemble(("  · ", "dim"), (text, "dim")))

    def finish(self, name: str, **facts: Fact) -> None:
        """Turn the bar into a line; the end of a stage made of several parts gets a line of its own."""
        if self._work is not None and self._work.name == name:
            facts.pop("seconds", None)
            self._work.facts.update(facts)
            self._retire()
        else:
            self._retire()
            took_s = facts.pop("seconds", None)
            self._line(name, "", "" if took_s is None else duration(float(took_s)), facts)

    def _retire(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            self._line(work.name, work.counts(), duration(work.meter.elapsed_s), work.facts)

    def _line(self, name: str, counts: str, took: str, facts: Mapping[str, Fact]) -> None:
        from rich.text import Text

        line = Text.assemble(
            ("  ✓ ", "green"), (f"{name:<24}", "bold"), f" {counts:<18}", (f"{took:>7}", "cyan")
        )
        for part in (_facts(facts), _domains(facts)):
            if part:
                line.append(f"   {part}", "dim")
        self._console.print(line)

    def render(self) -> RenderableType:
        """Return what is redrawn: the current stage."""
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.spinner import Spinner
        from rich.table import Table
        from rich.text import Text

        total_time = Text(f"  {duration(self._clock.now() - self._begun)} in all", style="dim")
        work = self._work
        if work is None:
            return total_time
        row = Table.grid(padding=(0, 1))
        fraction = work.meter.fraction
        bar = ProgressBar(100, 0 if fraction is None else fraction * 100, width=28, pulse=fraction is None)
        name = Text(work.name, style="bold")
        row.add_row(Text(" "), Spinner("dots", style="cyan"), name, bar, work.counts(), work.timing())
        lines: list[RenderableType] = [row]
        lines += [
            Text(f"    {part}", style="cyan") for part in (_facts(work.facts), _domains(work.facts)) if part
        ]
        return Group(*lines, total_time)


@contextmanager
def progress(console: Console) -> Generator[Observer]:
    """Yield the observer that fits where output goes."""
    if not console.is_terminal:
        yield PlainProgress(console)
        return
    from rich.live import Live

    display = LiveProgress(console)
    with Live(get_renderable=display.render, console=console, refresh_per_second=4, transient=True):
        yield display
