"""The study of asynchrony, at sizes that only show that its path is whole."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def study(folder: Path, *more: str) -> str:
    command = [sys.executable, "-m", "studies.asynchrony", "--quick", "--work", str(folder / "runs")]
    done = subprocess.run(
        [*command, "--docs", str(folder / "docs"), *more],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_study_goes_on_where_it_stopped_and_its_lag_is_exact(tmp_path: Path) -> None:
    data, page = tmp_path / "docs" / "asynchrony", tmp_path / "docs" / "asynchrony.md"
    page.parent.mkdir()
    page.write_text("# Mine\n\nBefore.\n\n<!-- result:begin -->\nold\n<!-- result:end -->\n\nAfter.\n")
    assert "sync, seed 0" in study(tmp_path, "--limit", "1")
    first = (data / "sync-0.json").read_bytes()
    told = study(tmp_path, "--limit", "1")
    assert "async-8, seed 0" in told and "sync, seed 0 (" not in told
    assert (data / "sync-0.json").read_bytes() == first
    for name, ages in (("sync-0", {"0": 1.0}), ("async-8-0", {"0": 0.5, "1": 0.5})):
        run = json.loads((data / f"{name}.json").read_text())
        assert run["staleness"] == ages, "two steps of a bound of 8 lag by 0 and 1 versions"
        assert sorted(run["evaluations"]) == ["0", "1", "2"]
        assert [len(tasks) for tasks in run["evaluations"]["2"].values()] == [2, 2]
    report = page.read_text()
    assert report.startswith("# Mine\n\nBefore.") and report.endswith("After.\n") and "old" not in report
    assert "2 of 12 runs are in" in report and "| async-8 | 1 |" in report
    for figure in data.glob("*.svg"):
        ElementTree.parse(figure)
        assert f"asynchrony/{figure.name}" in report
