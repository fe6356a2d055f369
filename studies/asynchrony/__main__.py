"""Synchronous or not, corrected or not, scaled or not, replayed or not: a study on a model of a few layers.

    python -m studies.asynchrony                    # whatever is missing, then the report
    python -m studies.asynchrony --limit 1          # one run at most
    python -m studies.asynchrony --report           # the report of what is there

A finished run leaves one small file in ``docs/studies/asynchrony/``; it is not run again as long as its
configuration stays the same. Every arm gets its first seed before any gets its second.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from studies.asynchrony.arms import QUICK, Arm, Sizes, arms
from studies.asynchrony.report import write_report
from studies.asynchrony.runs import result_of, run_arm, run_start

from lehr.core.errors import LehrError
from lehr.pipeline.observer import Silent

DOCS = Path(__file__).parents[2] / "docs" / "studies"


class Lines(Silent):
    """Prints what a run has to say, and nothing of its progress."""

    def note(self, text: str) -> None:
        """Print it."""
        print(f"  {text}", flush=True)


def missing(sizes: Sizes, chosen: tuple[Arm, ...], data: Path) -> Iterator[tuple[Arm, int]]:
    """Yield the runs that have no result: seed by seed, and in the end those that are extra."""
    runs = [(arm, seed) for seed in sizes.seeds for arm in chosen]
    for arm, seed in sorted(runs, key=lambda run: run[0].extra):
        if result_of(sizes, arm, seed, data) is None:
            yield arm, seed


def study(sizes: Sizes, work: Path, docs: Path, limit: int | None) -> int:
    """Run what is missing, ``limit`` runs at most, and write the report. Returns how many are missing still."""
    data = docs / "asynchrony"
    todo = list(missing(sizes, arms(), data))
    for number, (arm, seed) in enumerate(todo[:limit], start=1):
        begun = time.monotonic()
        print(f"{arm.name}, seed {seed} ({number} of {len(todo)} that are missing)", flush=True)
        start = run_start(sizes, seed, work, data, Lines())
        run_arm(sizes, arm, seed, start, work, data, Lines())
        print(f"  {time.monotonic() - begun:.0f} s", flush=True)
    write_report(sizes, docs)
    return max(0, len(todo) - (len(todo) if limit is None else limit))


def main(argv: list[str]) -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m studies.asynchrony", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/study-asynchrony"), help="folder of the runs")
    parser.add_argument("--docs", type=Path, default=DOCS, help="folder of the report and its data")
    parser.add_argument("--limit", type=int, help="runs at most; the next call goes on")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="sizes that show the path is whole, nothing else")
    asked = parser.parse_args(argv)
    sizes = QUICK if asked.quick else Sizes()
    try:
        left = study(sizes, asked.work, asked.docs, 0 if asked.report else asked.limit)
    except LehrError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{left} runs are missing" if left else f"wrote {asked.docs / 'asynchrony.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
