"""``lehr sandbox``."""

from __future__ import annotations

import asyncio
import difflib
import math
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from lehr.app.tables import json_option
from lehr.core.errors import ConfigError
from lehr.core.task import parse_size
from lehr.sandbox.base import ExecResult, Limits, Spec

RAISE = {
    "timeout_wall": "--timeout SECONDS",
    "timeout_cpu": "--timeout SECONDS",
    "oom": "--memory SIZE",
    "pids": "--pids NUMBER",
    "disk": "--disk SIZE",
    "output": "--output SIZE",
}
"""For each limit that can end a program, the option that raises it."""

CASE_S = 60.0
FIRST_S = 150.0
"""For the first box of all: a cluster may have to fetch its image."""

STATUS = {"timeout_wall": 124, "timeout_cpu": 124}
"""Exit statuses of verdicts that have a customary one; other limits give 125."""


class Seconds(click.FloatRange):
    """A length of time, up to a day. A range alone lets ``nan`` through."""

    def __init__(self) -> None:
        super().__init__(0.01, 86400)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return seconds, or fail and name the range."""
        if math.isnan(seconds := click.FLOAT.convert(value, param, ctx)):
            self.fail(f"{seconds} is not in the range {self._describe_range()}.", param, ctx)
        return super().convert(value, param, ctx)


@click.group()
def sandbox() -> None:
    """Run one command in a box, check what this host isolates, trace what a run did in its boxes."""


@sandbox.command("run", context_settings={"allow_interspersed_args": False})
@click.option("--memory", default="512M", show_default=True, help="Memory of all its processes together.")
@click.option("--timeout", default=10.0, show_default=True, type=Seconds(), help="Seconds.")
@click.option("--disk", default="64M", show_default=True, help="What it may write.")
@click.option("--pids", default=64, show_default=True, type=click.IntRange(1), help="Processes at once.")
@click.option("--output", default="1M", show_default=True, help="Output that is kept.")
@click.option("--allow", "allowed", multiple=True, metavar="HOST", help="A host that it may reach; repeatable.")
@click.option(
    "--image",
    default="host",
    show_default=True,
    help="A root folder, oci:TAR, docker:TAR, a declared image, or an engine's own name.",
)
@click.option("-i", "--stdin", "feed", is_flag=True, help="Pass on standard input, read to its end first.")
@click.option("--backend", default="bwrap", show_default=True, help="How the box is made.")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND…")
def run(
    memory: str,
    timeout: float,
    disk: str,
    pids: int,
    output: str,
    image: str,
    allowed: tuple[str, ...],
    feed: bool,
    backend: str,
    argv: tuple[str, ...],
) -> int:
    """Run COMMAND in a fresh box: no network but to the hosts of --allow, no home, its own files and limits.

    For example: lehr sandbox run --memory 256M --timeout 5 -- python3 -c "print(6*7)"
    """
    limits = Limits(
        memory_bytes=_size("--memory", memory),
        disk_bytes=_size("--disk", disk),
        output_bytes=_size("--output", output),
        pids=pids,
        wall_s=timeout,
        cpu_s=timeout,
    )
    stdin = sys.stdin.buffer.read() if feed else b""
    result = asyncio.run(_run(backend, Spec(_place(image), limits, allowed), argv, stdin))
    sys.stdout.buffer.write(result.stdout)
    sys.stdout.flush()
    sys.stderr.buffer.write(result.stderr)
    sys.stderr.flush()
    click.echo(_line(result), err=True)
    if result.exit_code is not None:
        return result.exit_code
    if result.signal is not None and result.verdict == "signal":
        return 128 + result.signal
    return STATUS.get(result.verdict, 125)


@sandbox.command("check")
@click.option("--backend", default="bwrap", show_default=True, help="What makes the boxes.")
@click.option("--case", "chosen", multiple=True, help="Only this case, for example S1; may be repeated.")
@json_option
def check(backend: str, chosen: tuple[str, ...], as_json: bool) -> int:
    """Attack boxes on this host, and show what it isolates and what it cannot. Takes some seconds."""
    from lehr.app.preflight import require_fit_host
    from lehr.app.tables import show
    from lehr.sandbox.conformance import CASES

    unknown = [name for name in chosen if name not in CASES]
    if unknown:
        raise ConfigError(f"there is no case {unknown[0]}", expected=f"one of {', '.join(CASES)}")
    require_fit_host(backend, timeout_s=FIRST_S)
    names = [name for name in CASES if not chosen or name in chosen]
    rows = asyncio.run(_check(backend, names, quiet=as_json))
    show(rows, as_json=as_json)
    failed = [row["case"] for row in rows if row["held"] != "yes"]
    if failed and not as_json:
        click.echo(f"{len(failed)} of {len(rows)} promises do not hold here: {', '.join(failed)}", err=True)
    return 1 if failed else 0


async def _check(backend: str, names: list[str], *, quiet: bool) -> list[dict[str, Any]]:
    from lehr.core.errors import LehrError
    from lehr.sandbox.conformance import CASES, NotHeld
    from lehr.sandbox.pool import Pool

    rows: list[dict[str, Any]] = []
    for number, name in enumerate(names, 1):
        if not quiet:
            click.echo(f"\r  {number} of {len(names)}  {name} ", nl=False, err=True)
        promise = " ".join((CASES[name].__doc__ or "").split())
        pool = Pool(backend, warm=0)
        try:
            async with asyncio.timeout(CASE_S):
                await CASES[name](pool)
            held, seen = "yes", ""
        except (NotHeld, LehrError) as error:
            held, seen = "no", str(error)
        except TimeoutError:
            held, seen = "no", f"no answer within {CASE_S:g} s"
        finally:
            await pool.close()
        rows.append({"case": name, "held": held, "promise": promise, "seen": seen})
    if not quiet:
        click.echo("\r" + 30 * " " + "\r", nl=False, err=True)
    return rows


@sandbox.command("trace")
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("task", required=False)
@json_option
def trace(run: Path, task: str | None, as_json: bool) -> None:
    """Show every call that was made in a box for TASK, a task or one attempt, in order, with how each box was
    obtained. Without TASK: which tasks have how many calls.
    """
    from lehr.app.tables import show
    from lehr.ledger.reader import LedgerReader
    from lehr.pipeline.folder import RunFolder

    reader = LedgerReader(RunFolder.open(run)[0].ledger)
    try:
        calls = [event for event in reader.events() if event.kind.startswith("sandbox.")]
    finally:
        reader.close()
    if task is None:
        counted = Counter(str(event.fields["task"]) for event in calls if "task" in event.fields)
        show([{"task": name, "calls": count} for name, count in sorted(counted.items())], as_json=as_json)
        return
    chosen = [event for event in calls if task in (event.fields.get("task"), event.fields.get("attempt"))]
    if not chosen:
        known = sorted({str(event.fields["task"]) for event in calls if "task" in event.fields})
        near = difflib.get_close_matches(task, known)
        raise ConfigError(
            f"{run} records no call in a box for {task}",
            expected="a task or an attempt of the run",
            hint=f"Did you mean {near[0]}?" if near else f"`lehr sandbox trace {run}` lists them",
        )
    if as_json:
        show([{"kind": e.kind, "at": e.at, **e.fields} for e in chosen], as_json=True)
        return
    before = ("", "")
    for event in chosen:
        fields = event.fields
        here = (str(fields.get("attempt", "")), str(fields["box"]))
        if here[0] != before[0]:
            click.secho(here[0] or "no attempt", bold=True)
        if here != before:
            click.echo(f"  {_obtained(fields)}")
        before = here
        click.echo(_call(event.kind, fields))


def _obtained(fields: Mapping[str, Any]) -> str:
    waited = f"{1e3 * fields['queue_s']:.0f} ms in line, {1e3 * fields.get('made_s', 0.0):.0f} ms to get it"
    purpose = f" to {fields['phase']}" if fields.get("phase") else ""
    return f"{fields['box']}{purpose}: {fields['backend']}, {fields['obtained']}, {waited}"


def _call(kind: str, fields: Mapping[str, Any]) -> str:
    """Return a line of figures, and one or two of words."""
    if kind != "sandbox.exec":
        return f"    {kind.removeprefix('sandbox.')} {fields['snapshot']}  {1e3 * fields['wall_s']:.0f} ms"
    ended = fields["verdict"] if fields["verdict"] != "exit" else f"exit {fields['exit_code']}"
    figures = (
        f"{1e3 * fields['wall_s']:.0f} ms wall, {1e3 * fields['cpu_s']:.0f} ms CPU, "
        f"{fields['peak_bytes'] / (1 << 20):.1f} MiB, {fields['read_bytes'] >> 10} KiB read, "
        f"{fields['written_bytes'] >> 10} written"
    )
    lines = [f"    {ended:8} {figures}", *_folded(fields["program"])]
    if refused := [*fields.get("denied", ()), *_unreached(fields)]:
        lines += _folded(f"refused: {', '.join(refused)}")
    if fields["detail"] and fields["verdict"] not in ("ok", "exit"):
        lines += _folded(fields["detail"])
    return "\n".join(lines)


def _folded(text: str) -> list[str]:
    from lehr.app.report.svg import visible

    width, indent = max(40, shutil.get_terminal_size().columns), 13 * " "
    return textwrap.wrap(visible(text), width, initial_indent=indent, subsequent_indent=indent)


def _unreached(fields: Mapping[str, Any]) -> list[str]:
    return [f"{item['host']}:{item['port']}" for item in fields.get("connections", ()) if item["refused"]]


def _place(image: str) -> str:
    """Make a relative path of an image absolute, and build it beforehand if it is a declared one."""
    from lehr.sandbox import roots
    from lehr.sandbox.images import declaration

    name = declaration.absolute(image, Path.cwd())
    if declaration.locate(name):
        roots.make(name, lambda text: click.echo(text, err=True))
    return name


def _size(option: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


async def _run(backend: str, spec: Spec, argv: tuple[str, ...], stdin: bytes) -> ExecResult:
    from lehr.sandbox.pool import Pool

    pool = Pool(backend, warm=0, limit=1)
    try:
        async with pool.lease(spec) as box:
            return await box.exec(list(argv), stdin=stdin)
    finally:
        await pool.close()


def _line(result: ExecResult) -> str:
    usage = result.usage
    ended = f"exit {result.exit_code}" if result.verdict in ("ok", "exit") else result.verdict
    text = (
        f"[{ended}; {usage.wall_s:.2f} s wall, {usage.cpu_s:.2f} s CPU, "
        f"{usage.peak_bytes / (1 << 20):.0f} MiB, {usage.peak_pids} processes]"
    )
    if result.denied:
        text += f" Refused system calls: {', '.join(result.denied)}."
    for item in result.connections:
        if item.refused:
            text += f" Not connected: {item.refused}."
    if result.detail:
        text += f" {result.detail[0].upper()}{result.detail[1:]}"
        if result.verdict == "ok":
            text += f". Raise it with {RAISE['disk']}."
    if result.verdict in RAISE:
        text += f". Raise it with {RAISE[result.verdict]}."
    if result.truncated and result.verdict != "output":
        text += " The middle of the output was cut out; --output SIZE keeps more."
    return text
