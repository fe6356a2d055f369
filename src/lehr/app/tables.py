"""Rows to a table on a terminal, or to JSON for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import click

if TYPE_CHECKING:
    from rich.console import Console

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")

_PIPED_WIDTH = 160
_GAP = 3
_LEAST = 6


def console(*, stderr: bool = False) -> Console:
    """Return a console; where output is not a terminal, as wide as ``COLUMNS`` says, else wide enough for every
    table.
    """
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    if made.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return made
    return Console(stderr=stderr, highlight=False, width=_PIPED_WIDTH)


def show(
    rows: Sequence[Mapping[str, Any]],
    *,
    as_json: bool,
    columns: Sequence[str] | None = None,
    cut: Sequence[str] = (),
    empty: str = "nothing to show",
) -> None:
    """Print ``rows``. The table shows ``columns`` (all of them by default); JSON holds everything.

    The first column holds what one types, such as an id: it is never cut nor wrapped, numbers are not either.
    Where the terminal is narrow, the columns ``cut`` lose their ends and the others are wrapped.
    """
    if as_json:
        print_json(list(rows))
        return
    if not rows:
        click.echo(empty)
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    names = list(columns or rows[0])
    cells = {name: [_cell(row.get(name)) for row in rows] for name in names}
    out = console()
    most = _shares({name: longest([name, *cells[name]]) for name in names}, cut, out.width)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        numeric = all(isinstance(row.get(name), int | float | None) for row in rows)
        whole = numeric or name == names[0]
        table.add_column(
            name.replace("_", " "),
            justify="right" if numeric else "left",
            no_wrap=whole or name in cut,
            min_width=longest([name, *cells[name]]) if whole else None,
            max_width=most.get(name),
            overflow="ellipsis" if name in cut else "fold",
        )
    for index in range(len(rows)):
        table.add_row(*(Text(cells[name][index]) for name in names))
    out.print(table, crop=False)


def _shares(widths: Mapping[str, int], cut: Sequence[str], width: int) -> dict[str, int]:
    """Return the most that each column of ``cut`` may take, so that a table of ``widths`` fits ``width``."""
    wanted = {name: size for name, size in widths.items() if name in cut}
    spare = width - sum(size for name, size in widths.items() if name not in cut) - _GAP * len(widths)
    total = sum(wanted.values())
    return {
        name: size if total <= spare else max(_LEAST, spare * size // total) for name, size in wanted.items()
    }


def longest(texts: Iterable[str]) -> int:
    """Return the width that shows each of ``texts`` whole."""
    return max(map(len, texts), default=0)


def print_json(value: Any) -> None:
    """Print ``value`` as JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in cast("Sequence[object]", value))
    return str(value)
