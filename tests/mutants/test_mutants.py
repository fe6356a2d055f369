"""The runner itself, and that every mutant in this folder still fits the code."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent
MUTANTS = sorted(HERE.glob("*.toml"))


def runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lehr_mutant_runner", HERE / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", MUTANTS, ids=lambda p: p.stem)
def test_a_mutant_fits_the_code(path: Path) -> None:
    mutant = runner().load(path)
    assert path.stem.split("_")[0] in mutant.cases


def tree(tmp_path: Path, **changes: str) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("one = 1\ntwo = 2\ntwo_again = 2\n")
    (tmp_path / "test_a.py").write_text("def test_one(): ...\n")
    keys = {"case": '"X1"', "file": '"src/a.py"', "find": '"one = 1"', "replace": '"one = 3"'}
    keys["test"] = '"test_a.py::test_one"'
    path = tmp_path / "X1_break.toml"
    path.write_text("\n".join(f"{k} = {v}" for k, v in {**keys, **changes}.items() if v))
    return path


def test_a_mutant_is_read(tmp_path: Path) -> None:
    mutant = runner().load(tree(tmp_path), tmp_path)
    assert (mutant.cases, mutant.tests) == (("X1",), ("test_a.py::test_one",))


def test_layers_are_broken_together(tmp_path: Path) -> None:
    module, path = runner(), tree(tmp_path)
    more = '\n[[also]]\nfile = "src/a.py"\nfind = "two_again = 2"\nreplace = "two_again = 4"\n'
    path.write_text(path.read_text() + more)
    assert len(module.load(path, tmp_path).edits) == 2
    path.write_text(path.read_text().replace("two_again = 2", "three = 3"))
    with pytest.raises(module.BadMutant, match="occurs 0 times"):
        module.load(path, tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"find": '"= 2"'}, "occurs 2 times"),
        ({"find": '"zero"'}, "occurs 0 times"),
        ({"replace": '"one = 1"'}, "changes nothing"),
        ({"file": '"src/b.py"'}, "no src/b.py"),
        ({"test": '"test_a.py::test_two"'}, "no test"),
        ({"test": ""}, "needs test"),
        ({"replace": ""}, "needs replace"),
        ({"typo": '"x"'}, "unknown keys typo"),
        ({"case": "'"}, "X1_break"),
    ],
)
def test_a_mutant_that_cannot_be_used_is_named(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    module = runner()
    with pytest.raises(module.BadMutant, match=words):
        module.load(tree(tmp_path, **changes), tmp_path)


def test_the_report_gives_one_word_per_test(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        """<testsuites><testsuite>
        <testcase classname="tests.unit.test_a" name="test_p[1]"/>
        <testcase classname="tests.unit.test_a" name="test_p[2]"><failure/></testcase>
        <testcase classname="tests.unit.test_a" name="test_p[3]"/>
        <testcase classname="tests.unit.test_a" name="test_pq"><failure/></testcase>
        <testcase classname="tests.unit.test_a" name="test_s"><skipped/></testcase>
        <testcase classname="tests.unit.test_b" name="test_e"><error/></testcase>
        <testcase classname="tests.unit.test_b" name="test_ok"/>
        </testsuite></testsuites>"""
    )
    a, b = "tests/unit/test_a.py::", "tests/unit/test_b.py::"
    tests = (a + "test_p", a + "test_p[3]", a + "test_s", b + "test_e", b + "test_ok", b + "test_gone")
    assert runner()._read_report(report, tests) == {
        a + "test_p": "failed",
        a + "test_p[3]": "passed",
        a + "test_s": "skipped",
        b + "test_e": "failed",
        b + "test_ok": "passed",
    }
