"""``lehr runs``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from lehr.app.session import Session, shown
from lehr.app.tables import json_option


@click.group()
def runs() -> None:
    """List, show and resume runs."""


@runs.command("list")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=Path("runs"))
@json_option
def list_(folder: Path, as_json: bool) -> None:
    """Show the runs in FOLDER (runs/ by default), newest first."""
    from lehr.app.tables import show

    found = sorted(folder.glob("*/config.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    rows = [_row(path.parent) for path in found]
    show(rows, as_json=as_json, empty=f"no runs in {folder}. Start one with: lehr quickstart")


def _row(path: Path) -> dict[str, Any]:
    from lehr.core.errors import LehrError
    from lehr.ledger.reader import LedgerReader
    from lehr.pipeline.folder import RunFolder
    from lehr.pipeline.recipe import closing_name

    row: dict[str, Any] = {
        "run": shown(path),
        "model": None,
        "state": "unreadable",
        "stage": None,
        "started": None,
    }
    try:
        folder, recipe = RunFolder.open(path)
        row["model"] = recipe.model
        row["started"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(folder.config.stat().st_mtime))
        folder.require_ledger()
        if not folder.ledger.exists():
            return row | {"state": "not begun"}
        reader = LedgerReader(folder.ledger)
        try:
            stages = reader.stages()
        finally:
            reader.close()
    except LehrError as error:
        return row | {"stage": error.what.splitlines()[0]}
    closing = closing_name(recipe.stages[-1])
    done = {stage.name for stage in stages if stage.state == "done"}
    current = next((stage.name for stage in reversed(stages) if stage.state != "done"), None)
    return row | {"state": "done" if closing in done else "unfinished", "stage": current}


@runs.command("show")
@click.argument("run", type=click.Path(path_type=Path))
@json_option
def show_(run: Path, as_json: bool) -> None:
    """Show the stages of a run and their times, what was measured, and how far trainer and sampler agree."""
    from lehr.app.report.agreement import read_agreement
    from lehr.app.report.record import read_record
    from lehr.app.report.summary import summarise
    from lehr.app.report.table import print_summary
    from lehr.app.tables import console, print_json, show

    record = read_record(run)
    summary = summarise(
        record.attempts,
        domains=record.recipe.domains,
        stages=record.labels,
        seconds=record.seconds,
        pairs=record.pairs,
        notes=record.notes,
    )
    stages = [{"stage": s.name, "state": s.state, "seconds": round(s.seconds, 1)} for s in record.stages]
    agreement = [found.as_row() for found in read_agreement(record.lines)]
    if as_json:
        print_json(
            {
                "run": str(run),
                "digest": record.recipe.digest(),
                "recipe": record.recipe.model_dump(mode="json"),
                "stages": stages,
                "groups": dict(record.groups),
                "summary": summary.as_json(),
                "agreement": agreement,
            }
        )
        return
    show(stages, as_json=False, empty="no stage has begun")
    print_summary(summary, console())
    if agreement:
        click.echo("\nTrainer against sampler: distance of log-probabilities at the first step, in nats")
        show(agreement, as_json=False)


@runs.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.pass_obj
def resume(session: Session, run: Path) -> None:
    """Go on with a run that was stopped or died, from its last checkpoint."""
    from lehr.app.launch import launch
    from lehr.app.preflight import require_fit_host
    from lehr.pipeline.folder import RunFolder
    from lehr.pipeline.run import resume_run

    RunFolder.open(run)
    require_fit_host()
    launch(session, run, lambda observer: resume_run(run, observer))
