"""Writes docs/sandbox-cases.md: each case of the sandbox, its promise, and on which backend its test passed.

    python tools/sandbox_cases.py        runs the tests of the cases; takes a few minutes

A test belongs to the case that its name begins with (``test_s12_…``) and to the backend that it is run with, or
to bwrap.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

from lehr.sandbox.conformance import CASES
from lehr.sandbox.gvisor import INAPPLICABLE

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "sandbox-cases.md"
BACKENDS = ("bwrap", "bwrap-rlimits", "gvisor")
ELSEWHERE = {
    "S34": "After a rollback no file, process, mount, environment or clock survives.",
    "S35": "Boxes restored from one snapshot draw different random numbers and UUIDs.",
    "S38": "A lease that nobody renews expires, and renewing it afterwards is refused: no immortal box.",
    "S40": "Boxes of a killed host process end, and what it left behind is removed at the next start.",
    "S41": "Running out of memory inside a strong runtime is named so, not exit 128, 137 or 143.",
}
"""Cases that only a look from outside the box can show: they are no part of the exported suite."""
SKIPPED = {
    ("S41", "bwrap"): "its own kernel runtime is what S41 is about",
    ("S41", "bwrap-rlimits"): "as bwrap",
}
HEAD = """# Cases of the sandbox

What is promised, case by case, and where it holds. Written by `python tools/sandbox_cases.py` from the tests
that it ran. `bwrap-rlimits` is bwrap on a host whose control groups cannot be written. A dash: no test is run
there, since the case is one of the pool or of the host process, which are the same for every backend.
`lehr sandbox check` runs the exported part on your own host.

"""


def outcomes() -> dict[tuple[str, str], set[str]]:
    """Run the tests and return what became of them by case and backend."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "--dist",
            "loadfile",
            f"--junitxml={report}",
        ]
        places = ["tests/contract/sandbox", "tests/unit/sandbox"]
        subprocess.run([*command, "-k", "test_s", *places], cwd=ROOT, check=False)
        found: dict[tuple[str, str], set[str]] = defaultdict(set)
        for test in ElementTree.parse(report).iter("testcase"):
            match = re.match(r"test_s(\d+)_[^\[]*(?:\[(.*)\])?", test.get("name", ""))
            if match is None:
                continue
            backend = (
                match[2]
                if match[2] in BACKENDS
                else "gvisor"
                if "gvisor" in test.get("classname", "")
                else "bwrap"
            )
            word = "fails" if test.find("failure") is not None or test.find("error") is not None else "holds"
            found[f"S{match[1]}", backend].add("skipped" if test.find("skipped") is not None else word)
        return found


def row(case: str, found: dict[tuple[str, str], set[str]]) -> str:
    """Return a line of the table."""
    promise = " ".join((CASES[case].__doc__ or "").split()) if case in CASES else ELSEWHERE[case]
    cells: list[str] = []
    for backend in BACKENDS:
        words = found.get((case, backend), set())
        parts = [name for name in INAPPLICABLE if name == case or name.startswith(f"{case}-")]
        if "fails" in words:
            cells.append("**fails**")
        elif backend == "gvisor" and parts:
            cells.append("; ".join(f"not {name}: {INAPPLICABLE[name]}" for name in parts))
        elif "holds" in words:
            cells.append("holds")
        else:
            cells.append(SKIPPED.get((case, backend), "—"))
    return f"| {case} | {promise} | " + " | ".join(cells) + " |"


def main() -> int:
    """Write the page; fail if a case fails or has no test."""
    found = outcomes()
    cases = [f"S{number}" for number in range(1, 42)]
    lines = [row(case, found) for case in cases]
    table = ["| case | what holds | " + " | ".join(BACKENDS) + " |", "|---|---|" + "---|" * len(BACKENDS)]
    PAGE.write_text(HEAD + "\n".join([*table, *lines]) + "\n")
    failed = [case for case in cases if any("fails" in found.get((case, b), ()) for b in BACKENDS)]
    missing = [case for case in cases if not any("holds" in found.get((case, b), ()) for b in BACKENDS)]
    print(f"wrote {PAGE.relative_to(ROOT)}: {len(failed)} fail {failed}, {len(missing)} have no test {missing}")
    return 1 if failed or missing else 0


if __name__ == "__main__":
    sys.exit(main())
