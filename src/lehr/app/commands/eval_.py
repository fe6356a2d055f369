"""``lehr eval``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from lehr.app.commands.domains import IN
from lehr.app.tables import json_option
from lehr.core.task import Split


@click.command("eval")
@click.argument("domains", nargs=-1)
@click.option(
    "--model",
    required=True,
    help="A run folder, a Hugging Face folder, a model's name, or openai:NAME@BASE_URL.",
)
@click.option("--n", "count", default=100, show_default=True, type=click.IntRange(1), help="Tasks per domain.")
@click.option(
    "--split",
    type=click.Choice(["heldout", "validation", "train"]),
    default="heldout",
    show_default=True,
    help="Which tasks.",
)
@click.option(
    "--api", multiple=True, metavar="KEY=VALUE", help="How to ask an openai: model; may be given several times."
)
@click.option(
    "--pairs",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Instead of domains: how often a reward model prefers the better answer of a file's pairs.",
)
@click.option("--fast", "is_fast", is_flag=True, help="Measure the fast variant, as lehr serve --fast has it.")
@IN
@json_option
def eval_(
    domains: tuple[str, ...],
    model: str,
    count: int,
    split: Split,
    api: tuple[str, ...],
    pairs: Path | None,
    is_fast: bool,
    folders: tuple[Path, ...],
    as_json: bool,
) -> int:
    """Measure a model on domains: one greedy attempt at each task.

    DOMAINS are names, or patterns such as 'reasoning/*'. With a run folder as the model, its last stage is
    measured, on the same tasks as in its report. A few verdicts may differ from the report's where the model
    computes in bfloat16: sums are rounded according to which attempts share a batch, and so, now and then, the
    other of two nearly equal tokens comes first.

    openai:NAME@BASE_URL is a model behind an OpenAI-compatible API (without @BASE_URL, OpenAI's own). Its key
    is read from LEHR_API_KEY (OPENAI_API_KEY for OpenAI's own), or the variable that --api key_env=VARIABLE
    names.

    --pairs takes JSON lines with a prompt, the chosen answer and the rejected one, as a reward_model stage.
    """
    from lehr.app.preflight import require_fit_host
    from lehr.app.progress import progress
    from lehr.app.tables import console, show
    from lehr.engine.native.settings import NativeConfig, fast
    from lehr.pipeline.evaluate import evaluate_model

    if bool(domains) == (pairs is not None):
        raise click.UsageError("Name at least one domain, or a file with --pairs, and not both.")
    if pairs is not None:
        if api or is_fast:
            raise click.UsageError("--api and --fast are for domains, not for --pairs.")
        return _pairs(model, pairs, as_json)
    require_fit_host()
    with progress(console(stderr=True)) as observer:
        found = evaluate_model(
            model,
            domains,
            split=split,
            count=count,
            api=api,
            domain_paths=folders,
            observer=observer,
            engine=fast(NativeConfig()) if is_fast else None,
        )
    rows = [asdict(row) | {"rate": row.passed / row.n if row.n else None} for row in found]
    nothing = not any(row.n for row in found)
    if as_json:
        show(rows, as_json=True)
        return int(nothing)
    show(
        [
            {
                "domain": row.domain,
                "passed": f"{row.passed}/{row.n}",
                "rate": f"{row.passed / row.n:.1%}" if row.n else "-",
                "95 % interval": f"{row.low:.1%} to {row.high:.1%}",
                "not judged": row.invalid,
            }
            for row in found
        ],
        as_json=False,
    )
    for row in found:
        for cause, count in row.causes.items():
            click.echo(f"{row.domain}: {count} not judged. {cause}"[:600], err=True)
    return int(nothing)


def _pairs(model: str, file: Path, as_json: bool) -> int:
    from lehr.app.tables import show
    from lehr.pipeline.evaluate import evaluate_pairs

    row = evaluate_pairs(Path(model), file)
    if as_json:
        show([asdict(row)], as_json=True)
    else:
        interval = f"{row.low:.1%} to {row.high:.1%}"
        told = {"pairs": row.n, "right": f"{row.right / row.n:.1%}", "95 % interval": interval}
        show([told | {"margin": round(row.margin, 3)}], as_json=False)
    return 0
