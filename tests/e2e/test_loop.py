"""The whole loop on the tiny model: every stage, every process; killed at any point and resumed."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lehr.ledger.reader import LedgerReader

HERE = Path(__file__).parent
STEPS = 6


def start(folder: Path, mode: str) -> "subprocess.Popen[str]":
    command = [sys.executable, str(HERE / "loop.py"), str(folder), mode, str(STEPS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def read_until(process: "subprocess.Popen[str]", pattern: str) -> str:
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if re.search(pattern, seen):
            return seen
    raise AssertionError(f"{pattern!r} never came:\n{seen[-3000:]}")


def finish(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    rest = process.stdout.read()
    process.stdout.close()
    process.wait(60)
    return rest


def writes_to(pid: int, log: Path) -> bool:
    return os.path.realpath(f"/proc/{pid}/fd/1") == str(log.resolve())


def check_exactly_once(folder: Path, *, replays: bool = True) -> None:
    reader = LedgerReader(folder / "ledger.sqlite")
    states = reader.group_states("rl")
    batches = reader.batches("rl")
    replayed = reader.replay_counts()
    reader.close()
    assert set(replayed) == {(row.trace_id, batch.step) for batch in batches for row in batch.replays}
    assert bool(replayed) == replays
    assert all(first == 1 for first, _ in replayed.values()), "each replayed use is recorded once"
    ends = {state.partition(":")[0] for state in states}
    assert ends <= {"trained", "dropped"}, f"groups left open: {states}"
    assert [batch.step for batch in batches] == list(range(1, STEPS + 1))
    assert all(batch.applied for batch in batches)
    members = [group.id for batch in batches for group in batch.groups]
    assert len(members) == len(set(members)), "a group was bound to two steps"
    assert states["trained"] == len(members)


def metrics_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_every_stage_runs_in_its_own_process(tmp_path: Path):
    process = start(tmp_path / "run", "new")
    output = finish(process)
    assert process.returncode == 0, output[-3000:]
    check_exactly_once(tmp_path / "run")
    rows = metrics_of(tmp_path / "run")
    steps = [row for row in rows if row["stage"] == "rl"]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert all(0 <= row["rl/staleness_max"] <= 2 for row in steps)
    reader = LedgerReader(tmp_path / "run" / "ledger.sqlite")
    assert {row.label for row in reader.evaluations()} == {"base", "sft", "rl"}
    assert len(reader.evaluations("rl")) == 6
    reader.close()
    assert (tmp_path / "run" / "checkpoints" / "rl" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("victim", ["orchestrator", "engines", "trainer"])
def test_r28_kill_any_process_and_resume(tmp_path: Path, victim: str):
    folder = tmp_path / "run"
    process = start(folder, "new")
    read_until(process, r"stage rl\n(.*\n)*at 3\n")
    children = psutil.Process(process.pid).children(recursive=True)
    roles = sorted((folder / "logs").glob("engine-*.log" if victim == "engines" else f"{victim}.log"))
    if victim == "orchestrator":
        process.send_signal(signal.SIGKILL)
    for number, log in enumerate(roles):
        (role,) = [c for c in children if writes_to(c.pid, log)]
        role.send_signal(signal.SIGKILL)
        if number + 1 < len(roles):
            read_until(process, r"engine \d is taken out(.*\n)*at [45]\n")  # the run goes on with the others
    output = finish(process)
    assert process.returncode != 0, output[-2000:]
    deadline = time.monotonic() + 20
    while any(c.is_running() and c.status() != psutil.STATUS_ZOMBIE for c in children):
        assert time.monotonic() < deadline, "a process outlived its run"
        time.sleep(0.1)
    again = start(folder, "resume")
    output = finish(again)
    assert again.returncode == 0, output[-3000:]
    assert re.search(r"note resumed rl at step [34567]", output), output[-2000:]
    check_exactly_once(folder)
    output = finish(start(folder, "resume"))
    assert "is finished; nothing is left to do" in output and "stage" not in output, output[-2000:]
