"""``lehr report``."""

from __future__ import annotations

from pathlib import Path

import click

from lehr.app.session import shown
from lehr.app.tables import json_option


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--tensorboard", is_flag=True, help="Also write the metrics to RUN/tensorboard.")
@json_option
def report(run: Path, tensorboard: bool, as_json: bool) -> None:
    """Write a run's report again from its record.

    Works on runs that are still going on, and on those that died.
    """
    from lehr.app.launch import close
    from lehr.app.report.write import write_report
    from lehr.app.tables import print_json

    if tensorboard:
        from lehr.app.report.tensorboard import export

        click.echo(f"tensorboard --logdir {shown(export(run))}", err=True)
    if as_json:
        summary, _ = write_report(run)
        print_json(summary.as_json())
    else:
        close(run)
