"""The program ``lehr``: a group of commands that are imported when they are called, and the one place where
an error becomes a message and an exit status.

    0    done
    1    a run failed, or a check found something; what was done is kept, the message says how to go on
    2    a mistake in what was asked: what failed, what was expected, what to type next
    70   a defect of lehr: one line, and the file that holds the traceback
    130  stopped by Ctrl-C; by SIGTERM 143, by SIGHUP 129

A new command is a module in ``lehr.app.commands`` and a line in ``COMMANDS``.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import click

from lehr import __version__
from lehr.app.boundary import report_error
from lehr.app.session import Session
from lehr.app.stopping import heed_requests_to_stop
from lehr.core.threads import share_cores


class Entry(NamedTuple):
    """Where a command lives, and its line in the help, known without importing it."""

    target: str
    summary: str


COMMANDS: dict[str, Entry] = {
    "quickstart": Entry("quickstart:quickstart", "The whole loop on a real small model, then a report"),
    "train": Entry("train:train", "Run the stages of a recipe"),
    "try": Entry("try_:try_", "Before and after, side by side"),
    "eval": Entry("eval_:eval_", "Measure a model on domains"),
    "serve": Entry("serve:serve", "Serve a model over HTTP to OpenAI's clients"),
    "domains": Entry("domains:domains", "List, show and make domains"),
    "sandbox": Entry("sandbox:sandbox", "Run one command in a box"),
    "images": Entry("images:images", "Build, list and remove the images of boxes"),
    "runs": Entry("runs:runs", "List, show and resume runs"),
    "report": Entry("report:report", "Write a run's report again from its record"),
    "models": Entry("models:models", "Fetch and convert models"),
    "doctor": Entry("doctor:doctor", "What is missing on this machine, and the command that mends it"),
}


class LazyGroup(click.Group):
    """Knows its commands by name; imports one only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order in which they are needed."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, or fail with the nearest names."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            near = difflib.get_close_matches(cmd_name, COMMANDS, n=3, cutoff=0.5)
            meant = f"Did you mean {' or '.join(near)}?" if near else f"Commands: {', '.join(COMMANDS)}."
            raise click.UsageError(f"no command {cmd_name!r}. {meant}", ctx)
        module, _, name = entry.target.partition(":")
        return getattr(importlib.import_module(f"lehr.app.commands.{module}"), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, so that help imports none of them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.summary) for name, entry in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lehr")
@click.option("--debug", is_flag=True, help="Show the traceback of an unexpected error.")
@click.pass_obj
def lehr(session: Session, debug: bool) -> None:
    """Post-train language models on tasks whose results can be checked.

    Start with `lehr quickstart`; `lehr doctor` says what this machine lacks.
    """
    session.debug = debug


def command_typed(args: Sequence[str]) -> str:
    """Return the command that ``args`` begin with, as far as it exists: ``lehr domains show``."""
    command: click.Command = lehr
    path = "lehr"
    context = click.Context(lehr, info_name=path)
    for word in args:
        if word.startswith("-") and command is lehr:
            continue
        known = isinstance(command, click.Group) and word in command.list_commands(context)
        below = command.get_command(context, word) if known and isinstance(command, click.Group) else None
        if below is None:
            break
        command, path = below, f"{path} {word}"
    return path


def run(argv: Sequence[str] | None = None, session: Session | None = None) -> int:
    """Run one command line and return its exit status. Never raises."""
    session = session or Session()
    args = sys.argv[1:] if argv is None else list(argv)
    try:
        result = lehr.main(args=args, prog_name="lehr", standalone_mode=False, obj=session)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except BaseException as error:  # the boundary: everything becomes a message and a status
        if isinstance(error, click.UsageError) and error.ctx is None:
            session.command = command_typed(args)
        return report_error(error, session)
    return result if isinstance(result, int) else 0


def main() -> None:
    """Run the program and exit with its status."""
    share_cores(os.environ)
    session = Session()
    heed_requests_to_stop(session)
    sys.exit(run(session=session))
