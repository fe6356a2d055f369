"""``lehr sandbox``."""

from __future__ import annotations

import asyncio
import sys

import click

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

STATUS = {"timeout_wall": 124, "timeout_cpu": 124}
"""Exit statuses of verdicts that have a customary one; other limits give 125."""


@click.group()
def sandbox() -> None:
    """Run one command in a box."""


@sandbox.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--memory", default="512M", show_default=True, help="Memory of all its processes together.")
@click.option("--timeout", default=10.0, show_default=True, type=click.FloatRange(0.01), help="Seconds.")
@click.option("--disk", default="64M", show_default=True, help="What it may write.")
@click.option("--pids", default=64, show_default=True, type=click.IntRange(1), help="Processes at once.")
@click.option("--output", default="1M", show_default=True, help="Output that is kept.")
@click.option("-i", "--stdin", "feed", is_flag=True, help="Pass on standard input, read to its end first.")
@click.option("--backend", default="bwrap", show_default=True, help="How the box is made.")
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND…")
def run(
    memory: str,
    timeout: float,
    disk: str,
    pids: int,
    output: str,
    feed: bool,
    backend: str,
    argv: tuple[str, ...],
) -> int:
    """Run COMMAND in a fresh box: no network, no home, its own files, processes and limits.

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
    result = asyncio.run(_run(backend, Spec(limits=limits), argv, stdin))
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
    if result.detail:
        text += f" {result.detail}"
    if result.verdict in RAISE:
        text += f". Raise it with {RAISE[result.verdict]}."
    if result.truncated and result.verdict != "output":
        text += " The middle of the output was cut out; --output SIZE keeps more."
    return text
