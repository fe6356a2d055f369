"""The program as a person uses it, on the tiny model: a whole run, Ctrl-C, resuming. ``test_loop`` kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RECIPE = """
model = "tiny"
domains = ["code/functions", "documents/invoices"]

[evaluation]
count = 2

[[stages]]
type = "sft"
demonstrations = 4
max_epochs = 1
batch_size = 4
validation_count = 1
train = { learning_rate = 1e-3 }

[[stages]]
type = "rl"
steps = 3
groups_per_batch = 2
group_size = 2
checkpoint_every = 1
refuse_batches = 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty place with a small recipe."""
    (tmp_path / "small.toml").write_text(RECIPE)
    return tmp_path


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start ``lehr`` in a folder; whatever still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def begin(folder: Path, *argv: str) -> subprocess.Popen[str]:
        started.append(_lehr(folder, *argv))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def _lehr(folder: Path, *argv: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "lehr", *argv],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=_heed_interrupts,
    )


def _heed_interrupts() -> None:
    """A shell starts background jobs with SIGINT ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def until(process: subprocess.Popen[str], text: str) -> str:
    """Read output until a line holds ``text``."""
    seen = ""
    assert process.stdout is not None
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} never came; the program said:\n{seen}")


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for the end and return status and the rest of the output."""
    out, _ = process.communicate(timeout=400)
    return process.returncode, out


def roles(run: Path) -> dict[str, int]:
    """Return the processes of a run by role: those whose output goes to one of its logs."""
    found: dict[str, int] = {}
    for pid in psutil.pids():
        try:
            log = Path(os.readlink(f"/proc/{pid}/fd/1"))
        except OSError:
            continue
        if log.parent == run / "logs":
            found[log.stem] = pid
    return found


def test_quickstart_walks_through_all_stages_and_reports(tmp_path: Path, start: Start) -> None:
    status, out = finish(start(tmp_path, "quickstart", "--model", "tiny", "--run", "run", "--control"))
    assert status == 0, out
    assert "Held-out tasks solved" in out and "lehr try run" in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert list(summary["stages"]) == ["base", "sft", "rl", "sft_more"]
    assert {"rl_minus_sft", "rl_minus_sft_more"} <= set(summary["paired"])
    for rates in summary["stages"].values():
        assert set(rates) == {"code/functions", "documents/invoices", "terminal/files"}
        assert all(rate["n"] == 8 for rate in rates.values())
    assert "<svg" in (tmp_path / "run" / "report.html").read_text()
    for stage in ("sft", "rl"):
        assert (tmp_path / "run" / "checkpoints" / stage / "model.safetensors").exists()
    status, out = finish(start(tmp_path, "runs", "show", "run", "--json"))
    assert status == 0 and json.loads(out)["summary"] == summary
    assert roles(tmp_path / "run") == {}


def test_a_request_to_stop_is_heeded_like_ctrl_c(folder: Path, start: Start) -> None:
    process = start(folder, "train", "small.toml", "--run", "run")
    until(process, "sft epoch 1")
    process.send_signal(signal.SIGTERM)
    status, out = finish(process)
    assert status == 143, out
    assert "lehr runs resume run" in out and "Traceback" not in out
    assert roles(folder / "run") == {}


def test_ctrl_c_stops_cleanly_and_only_the_same_config_resumes(folder: Path, start: Start) -> None:
    process = start(folder, "train", "small.toml", "--run", "run")
    until(process, "sft epoch 1")
    process.send_signal(signal.SIGINT)
    status, out = finish(process)
    assert status == 130, out
    assert "lehr runs resume run" in out and "Traceback" not in out
    assert roles(folder / "run") == {}
    config = folder / "run" / "config.json"
    kept = config.read_text()
    config.write_text(kept.replace('"steps": 3', '"steps": 4'))
    assert config.read_text() != kept
    status, out = finish(start(folder, "runs", "resume", "run"))
    assert status == 2 and "digest" in out
    config.write_text(kept)
    status, out = finish(start(folder, "runs", "resume", "run"))
    assert status == 0, out
    assert "resuming" in out
    assert list(json.loads((folder / "run" / "summary.json").read_text())["stages"]) == ["base", "sft", "rl"]
