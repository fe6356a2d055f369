"""Breaks the code on purpose, one mutant at a time, and checks that the named tests notice.

    python tests/mutants/run.py [CASE | FILE-STEM] ...      all of them without arguments

A mutant is a TOML file in this folder: ``case`` or ``cases``, ``file``, ``find`` (text that occurs exactly
once), ``replace``, ``test`` or ``tests``; where defences are layered, ``also``, a list of further edits with
``file``, ``find`` and ``replace``. Each worker has a copy of the tree, on which the tests must pass
as it is; a mutant is caught when every one of its tests fails on the changed copy. A test that is skipped,
missing or broken for another reason (it fails on the unchanged copy) does not count as a catch.
"""

from __future__ import annotations

import argparse
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
COPIED = ("src", "tests", "recipes", "docs", "benchmarks", "tools", "pyproject.toml", "README.md", "Makefile")
LIMIT_S = 300.0
BASELINE_LIMIT_S = 1800.0
NO_SHRINKING = """
from hypothesis import Phase, settings

settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None)
settings.load_profile("mutants")
"""
KEYS = {"case", "cases", "file", "find", "replace", "test", "tests", "also"}
EDIT = {"file", "find", "replace"}


class BadMutant(Exception):
    """A mutant file that cannot be used."""


@dataclass(frozen=True)
class Edit:
    """One change of one file."""

    file: str
    find: str
    replace: str


@dataclass(frozen=True)
class Mutant:
    """One deliberate break."""

    name: str
    cases: tuple[str, ...]
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant; ``word`` is ``caught`` or why it was not."""

    mutant: Mutant
    word: str
    detail: str
    seconds: float


def load(path: Path, root: Path = ROOT) -> Mutant:
    """Read a mutant and check it against the tree under ``root``."""
    try:
        raw = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise BadMutant(f"{path.name}: {error}") from error
    if unknown := set(raw) - KEYS:
        raise BadMutant(f"{path.name}: unknown keys {', '.join(sorted(unknown))}")
    cases = tuple(raw.get("cases") or filter(None, [raw.get("case")]))
    tests = tuple(raw.get("tests") or filter(None, [raw.get("test")]))
    needed = {"case": cases, "test": tests, "file": raw.get("file"), "find": raw.get("find")}
    missing = [key for key, value in needed.items() if not value]
    if missing or "replace" not in raw:
        raise BadMutant(f"{path.name}: needs {', '.join(missing) or 'replace'}")
    more = raw.get("also", [])
    if any(set(item) != EDIT for item in more):
        raise BadMutant(f"{path.name}: each of also needs {', '.join(sorted(EDIT))}")
    edits = tuple(Edit(item["file"], item["find"], item["replace"]) for item in (raw, *more))
    mutant = Mutant(path.stem, cases, edits, tests)
    for edit in edits:
        _check(edit, path.name, root)
    for test in tests:
        file, _, function = test.partition("::")
        body = (root / file).read_text() if (root / file).is_file() else ""
        if not function or f"def {function.partition('[')[0].split('::')[-1]}(" not in body:
            raise BadMutant(f"{path.name}: there is no test {test}")
    return mutant


def _check(edit: Edit, name: str, root: Path) -> None:
    source = root / edit.file
    if not source.is_file():
        raise BadMutant(f"{name}: there is no {edit.file}")
    count = source.read_text().count(edit.find)
    if count != 1:
        raise BadMutant(f"{name}: its text occurs {count} times in {edit.file}, not once")
    if edit.find == edit.replace:
        raise BadMutant(f"{name}: it changes nothing")


class Tree:
    """A copy of the repository in which one mutant at a time is tried."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                ignore = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info")
                shutil.copytree(source, folder / name, ignore=ignore, symlinks=True)
            elif source.exists():
                shutil.copy2(source, folder / name)
        with (folder / "tests" / "conftest.py").open("a") as conftest:
            conftest.write(NO_SHRINKING)  # that a test fails is enough; how little it takes does not matter
        found = subprocess.run(
            [sys.executable, "-c", "import lehr; print(lehr.__file__)"],
            env=self._environment(),
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        if not Path(found).resolve().is_relative_to(folder.resolve()):
            raise SystemExit(f"the copy is not what is tested: lehr comes from {found}")

    def try_out(self, mutant: Mutant) -> Verdict:
        """Change the copy, run the tests, change it back."""
        begun = time.monotonic()
        originals = {edit.file: (self.folder / edit.file).read_text() for edit in mutant.edits}
        for edit in mutant.edits:
            path = self.folder / edit.file
            path.write_text(path.read_text().replace(edit.find, edit.replace))
        try:
            results = self.outcomes(mutant.tests)
        finally:
            for file, original in originals.items():
                (self.folder / file).write_text(original)
        seconds = time.monotonic() - begun
        words = {test: results.get(test, "missing") for test in mutant.tests}
        escaped = {test: word for test, word in words.items() if word != "failed"}
        if not escaped:
            return Verdict(mutant, "caught", "", seconds)
        word = "survived" if "passed" in escaped.values() else next(iter(escaped.values()))
        return Verdict(mutant, word, ", ".join(f"{t} {w}" for t, w in escaped.items()), seconds)

    def outcomes(self, tests: tuple[str, ...], limit_s: float = LIMIT_S) -> dict[str, str]:
        """Run tests and return passed, failed, skipped or broken for each that ran."""
        report = self.folder / "report.xml"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        try:
            done = subprocess.run(
                [*command, f"--junitxml={report}", *tests],
                cwd=self.folder,
                env=self._environment(),
                capture_output=True,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:
            return dict.fromkeys(tests, "failed")
        if not report.exists():
            # the process died under the test (a killed interpreter is a failure), or pytest refused to run
            return dict.fromkeys(tests, "failed" if done.returncode not in (2, 3, 4, 5) else "broken")
        return _read_report(report, tests)

    def _environment(self) -> dict[str, str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "COV_"))}
        environment["PYTHONPATH"] = str(self.folder / "src")
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
        environment["HYPOTHESIS_STORAGE_DIRECTORY"] = str(self.folder / ".hypothesis")
        environment.setdefault("OMP_NUM_THREADS", "1")
        return environment


def _read_report(report: Path, tests: tuple[str, ...]) -> dict[str, str]:
    """Return one word per test; of a parametrised one, the worst of its instances."""
    worst = {"passed": 1, "skipped": 0, "failed": 3, "broken": 2}
    outcomes: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module, name = case.get("classname", ""), case.get("name", "")
        for test in tests:
            file, _, function = test.partition("::")
            dotted = ".".join([file.removesuffix(".py").replace("/", "."), *function.split("::")[:-1]])
            wanted = function.split("::")[-1]
            if module != dotted or not (name == wanted or name.partition("[")[0] == wanted):
                continue
            kinds = {child.tag for child in case}
            word = (
                "failed"
                if "failure" in kinds or "error" in kinds
                else "skipped"
                if "skipped" in kinds
                else "passed"
            )
            if worst[word] >= worst.get(outcomes.get(test, "skipped"), 0):
                outcomes[test] = word
    return outcomes


def main(arguments: list[str] | None = None) -> int:
    """Run the chosen mutants and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("cases", nargs="*", help="case ids or file stems; all without any")
    parser.add_argument(
        "--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), help="copies at once"
    )
    chosen = parser.parse_args(arguments)
    mutants: list[Mutant] = []
    bad: list[str] = []
    wanted = set(chosen.cases)
    for path in sorted(HERE.glob("*.toml")):
        try:
            mutant = load(path)
        except BadMutant as error:
            if not wanted or path.stem in wanted or path.stem.split("_")[0] in wanted:
                bad.append(str(error))
            continue
        if not wanted or wanted & {mutant.name, *mutant.cases}:
            mutants.append(mutant)
    if not mutants and not bad:
        print(f"no mutant for {', '.join(chosen.cases) or 'anything'}")
        return 2
    verdicts = _try_all(mutants, max(1, chosen.jobs)) if mutants else []
    for text in bad:
        print(f"  unusable  {text}")
    caught = sum(v.word == "caught" for v in verdicts)
    failed = len(verdicts) - caught + len(bad)
    print(f"{caught} passed, {failed} failed")
    return 1 if failed else 0


def _try_all(mutants: list[Mutant], jobs: int) -> list[Verdict]:
    width = max(len(m.name) for m in mutants)
    with tempfile.TemporaryDirectory(prefix="lehr-mutants-") as folder:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        jobs = min(jobs, len(mutants))
        for number in range(jobs):
            trees.put(Tree(Path(folder) / str(number)))
        first = trees.get()
        tests = tuple(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        print(f"{len(mutants)} mutants, {len(tests)} tests; first the tests as they are", flush=True)
        sound = first.outcomes(tests, BASELINE_LIMIT_S)
        trees.put(first)

        def one(mutant: Mutant) -> Verdict:
            unsound = {t: sound.get(t, "missing") for t in mutant.tests if sound.get(t) != "passed"}
            if unsound:
                detail = ", ".join(f"{t} {w}" for t, w in unsound.items())
                return Verdict(mutant, "unsound", f"without the mutant: {detail}", 0.0)
            tree = trees.get()
            try:
                return tree.try_out(mutant)
            finally:
                trees.put(tree)

        verdicts: list[Verdict] = []
        with ThreadPoolExecutor(jobs) as pool:
            for verdict in pool.map(one, mutants):
                mutant = verdict.mutant
                line = f"  {verdict.word:<9} {mutant.name:<{width}} {verdict.seconds:5.1f} s  {verdict.detail}"
                print(line.rstrip(), flush=True)
                verdicts.append(verdict)
        return verdicts


if __name__ == "__main__":
    sys.exit(main())
