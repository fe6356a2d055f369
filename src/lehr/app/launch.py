"""What every command that runs a recipe does around it: progress, then the report and the closing table."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lehr.app.progress import progress
from lehr.app.session import Session, shown
from lehr.app.tables import console
from lehr.pipeline.observer import Observer

if TYPE_CHECKING:
    from lehr.pipeline.run import RunResult


def launch(session: Session, folder: Path, begin: Callable[[Observer], RunResult]) -> None:
    """Run to the end, then write and print the results.

    session.run is set first, so that whatever goes wrong names the command that resumes.
    """
    session.run = folder
    begun = time.monotonic()
    out = console()
    with progress(out) as observer:
        begin(observer)
    close(folder, time.monotonic() - begun)


def close(folder: Path, took_s: float | None = None) -> None:
    """Write the report of a run and print its closing table and what to type next."""
    from lehr.app.meter import duration
    from lehr.app.report.table import print_summary
    from lehr.app.report.write import write_report
    from lehr.pipeline.models import last_stage

    summary, page = write_report(folder)
    print_summary(summary, console())
    name = shown(folder)
    click.echo("" if took_s is None else f"took {duration(took_s)}")
    click.echo(f"report      {shown(page)}")
    if last_stage(folder) is None:
        click.echo(f"go on       lehr runs resume {name}")
        return
    click.echo(f"try it      lehr try {name}")
    click.echo(f"measure it  lehr eval {' '.join(summary.domains)} --model {name}")


def new_folder(name: str) -> Path:
    """Return a fresh folder below ``runs/``."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = base, 2
    while folder.exists():
        folder, number = base.with_name(f"{base.name}-{number}"), number + 1
    return folder
