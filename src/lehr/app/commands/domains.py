"""``lehr domains``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lehr.app.tables import json_option

IN = click.option(
    "--in",
    "folders",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Also look for domains in this folder; built-in ones and ./domains are always there.",
)


@click.group()
def domains() -> None:
    """List, show and make domains."""


@domains.command("list")
@IN
@json_option
def list_(folders: tuple[Path, ...], as_json: bool) -> None:
    """Show every domain."""
    from lehr.app.tables import show
    from lehr.domains.catalogue import find_domains

    rows = [
        {
            "id": name,
            "title": domain.card.title,
            "capabilities": list(domain.card.capabilities),
            "turns": domain.card.max_turns,
            "train": domain.card.splits.get("train", 0),
            "heldout": domain.card.splits.get("heldout", 0),
            "source": domain.card.source,
            "licence": domain.card.licence,
        }
        for name, domain in find_domains(folders).items()
    ]
    columns = ["id", "title", "capabilities", "turns", "train", "heldout"]
    show(rows, as_json=as_json, columns=columns)


@domains.command("show")
@click.argument("name")
@click.option("--index", default=0, show_default=True, type=click.IntRange(0), help="Which task of train.")
@click.option("--clamp-resources", is_flag=True, help="Lower what a YAML task asks for to what is here.")
@IN
@json_option
def show_(name: str, index: int, clamp_resources: bool, folders: tuple[Path, ...], as_json: bool) -> None:
    """Show a domain's card and one of its tasks with the answer that earns full marks.

    NAME may also be a task in a YAML file: then what it resolves to on this machine is shown.
    """
    from lehr.app.tables import console, print_json
    from lehr.domains.catalogue import open_domain

    if name.endswith((".yaml", ".yml")):
        from lehr.domains.yaml_task import load_task

        print_json(load_task(Path(name), clamp=clamp_resources).model_dump(mode="json"))
        return

    domain = open_domain(name, folders)
    problem = domain.problem("train", index)
    card: dict[str, Any] = domain.card.model_dump(mode="json")
    if as_json:
        print_json(
            {"folder": str(domain.folder), "digest": domain.digest, "card": card}
            | {"task": problem.task.model_dump(mode="json"), "answer": list(problem.gold.answer)}
        )
        return
    from rich.panel import Panel
    from rich.text import Text

    out = console()
    out.print(Text.assemble((domain.card.id, "bold"), f"  {domain.card.title}"))
    if domain.card.description:
        out.print(Text(domain.card.description))
    terms = ", ".join(f"{term.verifier} (weight {term.weight:g})" for term in domain.card.reward)
    sizes = ", ".join(f"{split} {size}" for split, size in domain.card.splits.items())
    facts = {
        "judged by": terms,
        "tasks": sizes,
        "turns": domain.card.max_turns,
        "environment": domain.card.environment,
        "source": f"{domain.card.source}, {domain.card.licence}",
        "folder": domain.folder,
    }
    for key, value in facts.items():
        out.print(Text.assemble((f"{key:<12}", "dim"), str(value)))
    for message in problem.task.messages:
        out.print(Panel(Text(message.content), title=message.role, title_align="left", border_style="dim"))
    answer = "\n---\n".join(problem.gold.answer)
    out.print(
        Panel(Text(answer), title="an answer that earns full marks", title_align="left", border_style="green")
    )


@domains.command()
@click.argument("name")
@click.option(
    "--from-jsonl",
    "file",
    required=True,
    type=click.Path(path_type=Path),
    help='Lines such as {"prompt": "…", "expected": {"total": 12.5}}.',
)
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    default=Path("domains"),
    show_default=True,
    help="Folder to write it in.",
)
def new(name: str, file: Path, into: Path) -> None:
    """Make a domain from a file of prompts and expected fields; it trains at once."""
    from lehr.domains.jsonl import new_from_jsonl

    folder = new_from_jsonl(name, file, into)
    click.echo(f"wrote {folder}")
    click.echo(f"look at it  lehr domains show {name}" + ("" if into == Path("domains") else f" --in {into}"))
    click.echo(f"train on it lehr train recipes/quickstart.toml 'domains=[\"{name}\"]'")
