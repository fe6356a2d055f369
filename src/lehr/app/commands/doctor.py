"""``lehr doctor``."""

from __future__ import annotations

from dataclasses import asdict

import click

from lehr.app.tables import json_option

MARKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "missing": ("✗", "red")}


@click.command()
@json_option
def doctor(as_json: bool) -> int:
    """What is missing on this machine, and the command that mends it.

    Exit status 1 if the quickstart cannot run here.
    """
    from lehr.app.doctor import examine
    from lehr.app.tables import console, print_json

    checks = examine()
    unfit = [check for check in checks if check.state == "missing"]
    if as_json:
        print_json([asdict(check) for check in checks])
        return 1 if unfit else 0
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for check in checks:
        table.add_row(Text(*MARKS[check.state]), check.name, Text(check.detail))
        if check.mend:
            table.add_row("", "", Text(f"mend: {check.mend}", style="cyan"))
    out = console()
    out.print(table)
    verdict = "This machine cannot run the quickstart yet." if unfit else "Ready. Next: lehr quickstart"
    out.print(verdict, style="bold")
    return 1 if unfit else 0
