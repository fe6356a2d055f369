"""``lehr domains``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lehr.app.tables import json_option

if TYPE_CHECKING:
    from rich.console import Console

    from lehr.core.task import RewardTerm, Task
    from lehr.domains.card import Entry

HERE = Path("domains")

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
    from lehr.core.errors import ConfigError
    from lehr.domains.card import find_cards

    entries = sorted(find_cards(folders).items())
    broken = {name: entry.card for name, entry in entries if isinstance(entry.card, ConfigError)}
    rows = [_row(entry) for _, entry in entries]
    columns = ["id", "title", "capabilities", "turns", "train", "heldout"]
    show(rows, as_json=as_json, columns=columns, cut=["title", "capabilities"])
    for row in [] if as_json else rows:
        if row["note"]:
            click.echo(f"{row['id']}: {row['note']}")
    if broken and not as_json:
        for name, error in broken.items():
            click.echo(f"{name} cannot be used: {error}", err=True)


def _row(entry: Entry) -> dict[str, Any]:
    from lehr.core.errors import ConfigError

    card = entry.card
    notes = ["replaces built-in"] if entry.replaces_built_in else []
    if isinstance(card, ConfigError):
        return {
            "id": entry.id,
            "title": None,
            "capabilities": [],
            "turns": None,
            "train": None,
            "heldout": None,
            "source": None,
            "licence": None,
            "folder": str(entry.folder),
            "note": ", ".join([*notes, "cannot be used"]),
            "error": str(card),
        }
    return {
        "id": entry.id,
        "title": card.title,
        "capabilities": list(card.capabilities),
        "turns": card.max_turns,
        "train": card.splits.get("train", 0),
        "heldout": card.splits.get("heldout", 0),
        "source": card.source,
        "licence": card.licence,
        "folder": str(entry.folder),
        "note": ", ".join(notes),
        "error": None,
    }


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

        task = load_task(Path(name), clamp=clamp_resources)
        if as_json:
            print_json(task.model_dump(mode="json"))
        else:
            _show_task(task, console())
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
    from rich.text import Text

    out = console()
    out.print(Text.assemble((domain.card.id, "bold"), f"  {domain.card.title}"))
    if domain.card.description:
        out.print(Text(domain.card.description))
    sizes = ", ".join(f"{split} {size}" for split, size in domain.card.splits.items())
    _show_facts(
        {
            "judged by": _terms(domain.card.reward),
            "tasks": sizes,
            "turns": domain.card.max_turns,
            "environment": domain.card.environment,
            "source": f"{domain.card.source}, {domain.card.licence}",
            "folder": domain.folder,
        },
        out,
    )
    _show_messages(problem.task, out)
    _show_panel("\n---\n".join(problem.gold.answer), "an answer that earns full marks", "green", out)


def _show_task(task: Task, out: Console) -> None:
    """Print what a YAML task resolves to."""
    from rich.text import Text

    resources = task.resources
    out.print(Text(task.id, "bold"))
    facts: dict[str, object] = {
        "judged by": _terms(task.reward),
        "image": task.image,
        "cores": f"{resources.cpu:g}",
        "memory": f"{resources.memory_bytes / (1 << 20):g} MiB",
        "disk": f"{resources.disk_bytes / (1 << 20):g} MiB",
        "timeout": f"{task.timeout_s:g} s",
        "turns": f"{task.max_turns}, of {task.max_tokens} tokens at most",
        "setup": ", ".join(task.setup),
        "files": ", ".join(task.files),
        "artifacts": ", ".join(task.artifacts),
    }
    _show_facts({name: value for name, value in facts.items() if value}, out)
    _show_messages(task, out)


def _terms(reward: Sequence[RewardTerm]) -> str:
    return ", ".join(f"{term.verifier} (weight {term.weight:g})" for term in reward)


def _show_facts(facts: Mapping[str, object], out: Console) -> None:
    from rich.text import Text

    for key, value in facts.items():
        out.print(Text.assemble((f"{key:<12}", "dim"), str(value)))


def _show_messages(task: Task, out: Console) -> None:
    for message in task.messages:
        _show_panel(message.content, message.role, "dim", out)


def _show_panel(text: str, title: str, style: str, out: Console) -> None:
    from rich.panel import Panel
    from rich.text import Text

    out.print(Panel(Text(text), title=title, title_align="left", border_style=style))


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
    "--in",
    "into",
    type=click.Path(path_type=Path),
    default=HERE,
    show_default=True,
    help="Folder to write it in.",
)
@click.option("--into", "into_too", type=click.Path(path_type=Path), hidden=True)
def new(name: str, file: Path, into: Path, into_too: Path | None) -> None:
    """Make a domain from a file of prompts and expected fields; it trains at once."""
    from lehr.domains.making import new_from_jsonl

    into = into_too or into
    made = new_from_jsonl(name, file, into)
    sizes = ", ".join(f"{size} {split}" for split, size in made.sizes.items())
    click.echo(f"wrote {made.folder}: {sizes} tasks")
    if made.repeated:
        lines = "1 line" if made.repeated == 1 else f"{made.repeated} lines"
        click.echo(f"left out {lines} that stood there before")
    elsewhere = into != HERE
    click.echo(f"look at it    lehr domains show {name}" + (f" --in {into}" if elsewhere else ""))
    places = f" 'domain_paths=[\"{into.resolve()}\"]'" if elsewhere else ""
    click.echo(f"train on it   lehr train quickstart 'domains=[\"{name}\"]'{places}")
