"""``lehr try``."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lehr.app.tables import json_option

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from lehr.pipeline.compare import Comparison, Said

_DOMAIN = re.compile(r"[\w-]+(/[\w-]+)+")


@click.command("try")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("prompt", required=False, metavar="[PROMPT|DOMAIN]")
@click.option("--n", "count", default=3, show_default=True, type=click.IntRange(1), help="Tasks of a DOMAIN.")
@click.option("--max-tokens", default=128, show_default=True, type=click.IntRange(1), help="For a PROMPT.")
@click.option("--like", metavar="DOMAIN", help="Put the system message of this domain before a PROMPT.")
@json_option
def try_(run: Path, prompt: str | None, count: int, max_tokens: int, like: str | None, as_json: bool) -> None:
    """Before and after, side by side.

    Shows what the base model and the trained one answer: to any PROMPT, to held-out tasks of a DOMAIN (then
    with the verdict), or, with neither, to one task of each domain of the run.
    """
    from lehr.app.preflight import require_fit_host
    from lehr.app.progress import progress
    from lehr.app.tables import console, print_json
    from lehr.pipeline.compare import compare, prepare

    domain = prompt if prompt is not None and _DOMAIN.fullmatch(prompt) else None
    if like is not None and (domain is not None or prompt is None):
        raise click.UsageError("--like goes with a PROMPT", click.get_current_context())
    text = None if domain else prompt
    question = prepare(run, text, domain, like=like, count=count, max_tokens=max_tokens)
    if len(question.work) < count and domain:
        click.echo(f"{domain} has {len(question.work)} held-out tasks", err=True)
    require_fit_host()
    click.echo("asking the base model, then the trained one …", err=True)
    with progress(console(stderr=True)) as observer:
        pairs = compare(question, observer)
    if as_json:
        print_json([asdict(pair) for pair in pairs])
        return
    out = console()
    for pair in pairs:
        _show(pair, out)


def _show(pair: Comparison, out: Console) -> None:
    from rich import box
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    from lehr.app.report.svg import visible

    out.print(Panel(Text(visible(pair.prompt)), title="prompt", title_align="left", border_style="dim"))
    table = Table(box=box.ROUNDED, expand=True, border_style="dim")
    for name, said in (("before", pair.before), ("after", pair.after)):
        table.add_column(Text.assemble((name, "bold"), "  ", _verdict(said)), ratio=1)
    table.add_row(_answer(pair.before), _answer(pair.after))
    out.print(table)


def _answer(said: Said) -> Text:
    """Return the answer; where the environment spoke in between, with the speaker above each turn."""
    from rich.text import Text

    from lehr.app.report.svg import visible

    turns = said.turns or (("assistant", said.text),)
    answer = Text()
    for speaker, text in turns:
        if len(turns) > 1:
            name = "tool output" if speaker == "tool" else speaker
            answer.append(f"{name}\n", "bold cyan" if speaker == "tool" else "bold")
        answer.append(visible(text.strip()) + "\n", "dim" if speaker == "tool" else "")
    if said.cut:
        answer.append("… cut off by the token limit", "yellow")
    answer.rstrip()
    return answer


def _verdict(said: Said) -> tuple[str, str]:
    from lehr.core.reward import Valid

    if said.reward is None:
        return "", ""
    if not isinstance(said.reward, Valid):
        return f"not judged: {said.reward.reason}", "yellow"
    if said.reward.passed:
        return "✓ passed", "green"
    return f"✗ failed, reward {said.reward.value:.2f}", "red"
