"""A requirement that is missing skips on a laptop and fails in CI."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[2] / "conftest.py"
TESTS = """
import pytest

def test_missing():
    pytest.skip("no such program")

def test_elsewhere():
    pytest.skip("other host: needs a newer kernel")

@pytest.fixture
def requirement():
    pytest.skip("no such file")

def test_fixture(requirement):
    pass

def test_fine():
    pass
"""
MODULE = 'import pytest\npytest.importorskip("no_such_module_at_all")\n'


@pytest.mark.parametrize(
    ("ci", "status", "expected"),
    [("", 0, "1 passed, 4 skipped"), ("true", 1, "1 failed, 1 passed, 1 skipped, 2 errors")],
)
def test_missing_requirements_fail_in_ci_only(tmp_path: Path, ci: str, status: int, expected: str) -> None:
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "test_some.py").write_text(TESTS)
    (tmp_path / "test_module.py").write_text(MODULE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"],
        cwd=tmp_path,
        env={**os.environ, "CI": ci},
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout
    assert expected in done.stdout
