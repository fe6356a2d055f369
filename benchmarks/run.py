"""Runs benchmarks and writes ``benchmarks/latest.json``.

    python -m benchmarks.run [NAME…|all]

A benchmark is a module beside this one with ``rows()``, which measures us and a peer alternately, in the
same call, and yields a :class:`benchmarks.row.Row` each.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from benchmarks.row import Row

from lehr.core.threads import share_cores

HERE = Path(__file__).parent
LATEST = HERE / "latest.json"
NOT_BENCHMARKS = {"run", "row"}
GROUPS = {
    "engine": ("engine", "cache", "fast", "context"),
    "train": ("train_sft", "train_sharing", "train_own_tokens", "train_grpo"),
}
"""Benchmarks that are run together under one name."""


def names() -> list[str]:
    """Return every benchmark: the modules here that define ``rows``."""
    found = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in NOT_BENCHMARKS)
    return [name for name in found if "\ndef rows(" in (HERE / f"{name}.py").read_text()]


def measure(chosen: Iterable[str]) -> list[Row]:
    """Run the named benchmarks and return their rows, printing each as it comes."""
    found: list[Row] = []
    for name in chosen:
        begun = time.monotonic()
        print(f"{name}:", flush=True)
        for row in importlib.import_module(f"benchmarks.{name}").rows():
            print(f"  {row}", flush=True)
            found.append(row)
        print(f"  ({time.monotonic() - begun:.0f} s)", flush=True)
    return found


def main(argv: list[str]) -> int:
    """Run what was asked for and write the file."""
    known = names()
    asked = [part for name in argv for part in GROUPS.get(name, (name,))]
    chosen = known if not argv or argv == ["all"] else asked
    unknown = [name for name in chosen if name not in known]
    if unknown:
        print(
            f"error: no benchmark {unknown[0]!r}\n  expected one of {', '.join((*known, *GROUPS))} or all",
            file=sys.stderr,
        )
        return 2
    share_cores(os.environ)  # for both sides
    rows = measure(chosen)
    LATEST.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    print(f"wrote {LATEST.relative_to(Path.cwd()) if LATEST.is_relative_to(Path.cwd()) else LATEST}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
