"""The closing table of a run, in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lehr.app.report.summary import Rate, Summary
from lehr.app.tables import longest
from lehr.evals.stats import Paired

if TYPE_CHECKING:
    from rich.console import Console

STAGE_TITLES = {"base": "base", "sft": "after SFT", "rl": "after RL", "sft_more": "more SFT instead"}
SHORT_TITLES = {"sft": "SFT", "rl": "RL", "sft_more": "more SFT"}


def title_of(stage: str) -> str:
    """Return how a stage is called in tables and charts."""
    return STAGE_TITLES.get(stage, f"after {stage}")


def print_summary(summary: Summary, out: Console) -> None:
    """Print pass rates per domain and stage with 95 % intervals, then the paired differences."""
    from rich import box
    from rich.table import Table

    if not summary.stages:
        out.print("Nothing has been measured yet.")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("domain", no_wrap=True, min_width=longest(summary.domains))
    for stage in summary.stages:
        table.add_column(title_of(stage), justify="right")
    for domain in summary.domains:
        table.add_row(domain, *(rate_text(rates[domain]) for rates in summary.stages.values()))
    if len(summary.domains) > 1:
        table.add_section()
        table.add_row("all", *(rate_text(rate) for rate in summary.pooled.values()), style="bold")
    out.print()
    out.print("Held-out tasks solved, with 95 % intervals", style="bold")
    out.print(table, crop=False)
    for name, difference in summary.paired.items():
        out.print(
            f"{difference_title(name):<20}{difference_text(difference)}, paired over {difference.n} tasks"
        )
    for note in summary.notes:
        out.print(f"note: {note}", markup=False, style="yellow")


def rate_text(rate: Rate) -> str:
    """Return ``68 % (58-76)``."""
    if not rate.n:
        return "-"
    return f"{rate.rate:.0%} ({rate.low * 100:.0f}-{rate.high * 100:.0f})"


def difference_title(name: str) -> str:
    """Return ``RL minus SFT`` for ``rl_minus_sft``."""
    after, _, before = name.partition("_minus_")
    return f"{SHORT_TITLES.get(after, after)} minus {SHORT_TITLES.get(before, before)}"


def difference_text(difference: Paired, unit: str = " points") -> str:
    """Return ``+13.0 points (+8.1 to +17.9)``."""
    low, high = difference.low * 100, difference.high * 100
    return f"{difference.diff * 100:+.1f}{unit} ({low:+.1f} to {high:+.1f})"
