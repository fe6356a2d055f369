"""The command line is an interface: a flag that goes or changes its meaning breaks somebody's script.

After a deliberate change: ``python tests/golden/test_cli_flags.py`` writes the new file; review the diff.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from lehr.app.cli import lehr

GOLDEN = Path(__file__).with_name("cli_flags.json")


def flags() -> dict[str, Any]:
    """Return every command with its arguments and options."""
    found: dict[str, Any] = {}

    def walk(command: click.Command, path: str, parent: click.Context | None) -> None:
        ctx = click.Context(command, info_name=path, parent=parent)
        found[path] = {
            "/".join(parameter.opts + parameter.secondary_opts): _plain(parameter)
            for parameter in command.params
        }
        if isinstance(command, click.Group):
            for name in command.list_commands(ctx):
                child = command.get_command(ctx, name)
                assert child is not None
                walk(child, f"{path} {name}", ctx)

    walk(lehr, "lehr", None)
    return found


def _plain(parameter: click.Parameter) -> dict[str, Any]:
    default = parameter.default
    shown = default if isinstance(default, str | int | float | bool) else None
    flag = isinstance(parameter, click.Option) and parameter.is_flag
    return {"required": parameter.required, "default": shown, "flag": flag, "many": parameter.nargs == -1}


def test_flags_are_those_that_were_agreed() -> None:
    assert flags() == json.loads(GOLDEN.read_text())


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(flags(), indent=1, sort_keys=True) + "\n")
