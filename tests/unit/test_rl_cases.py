"""Every case of docs/rl-cases.md has the tests that the page names, and a mutant that they notice."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_each_case_has_its_tests_and_a_mutant():
    rows = re.findall(
        r"^\| (R\d+) \| .* \| (.*) \|$", (ROOT / "docs" / "rl-cases.md").read_text(), re.MULTILINE
    )
    assert [case for case, _ in rows] == [f"R{n}" for n in range(1, 23)]
    for case, tests in rows:
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", tests)
        assert named, f"{case} names no test"
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(), f"{case}: {test} is not in {file}"
        mutants = [p.read_text() for p in (ROOT / "tests" / "mutants").glob(f"{case}_*.toml")]
        assert any(test in text for text in mutants for _, test in named), f"{case}: no mutant for its tests"
