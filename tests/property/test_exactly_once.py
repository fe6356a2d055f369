"""R28: kill the run at any statement, resume: no group lost, none trained twice, none in two final states."""

import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import event

from lehr.core.trace import Version
from lehr.ledger.reader import LedgerReader
from lehr.ledger.rows import ReplayRow
from lehr.ledger.store import Ledger

STEPS, PER_BATCH, CHECKPOINT_EVERY, IN_FLIGHT = 5, 2, 2, 5


class Killed(BaseException):
    """The process is gone. Nothing that was not committed exists."""


@contextmanager
def killed_after(ledger: Ledger, statements: int) -> Iterator[None]:
    left = [statements]

    def strike(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    engine = ledger._engine
    event.listen(engine, "before_cursor_execute", strike)
    event.listen(engine, "commit", strike)
    try:
        yield
    finally:
        event.remove(engine, "before_cursor_execute", strike)
        event.remove(engine, "commit", strike)


class Disk:
    """What survives a kill besides the ledger: saved weights. Weights are the ids that were applied."""

    def __init__(self) -> None:
        self.saved: dict[str, list[str]] = {}


def again_of(row: ReplayRow) -> str:
    return f"again {row.trace_id}"


def record_trace(ledger: Ledger, group_id: str) -> None:
    names = {"group_id": group_id, "stage": "rl", "domain": "d", "task_id": "t", "blob": ""}
    ledger.record_trace(trace_id=f"{group_id}-0", attempt=0, valid=True, value=1.0, passed=True, **names)


def train(ledger: Ledger, disk: Disk, drop_every: int) -> list[str]:
    """Run the stage from where the record says to its end and return the final weights."""
    view = ledger.resume_view("rl")
    done = view.checkpoint.step if view.checkpoint else 0
    weights = list(disk.saved[view.checkpoint.path]) if view.checkpoint else []
    for batch in view.batches:
        if batch.step > done:
            weights += [g.id for g in batch.groups] + [again_of(r) for r in batch.replays]
            ledger.mark_trained("rl", batch.step, replay=True)
            done = batch.step
    ready = deque(g.id for g in view.open_groups if g.state == "complete")
    again = deque(g.id for g in view.open_groups if g.state != "complete")
    for group_id in again:
        ledger.reopen_group(group_id)
    drawn = view.drawn
    before = [g.id for batch in view.batches for g in batch.groups]
    for step in range(done + 1, STEPS + 1):
        while len(ready) < PER_BATCH:
            running: list[str] = []
            while len(running) < IN_FLIGHT:
                if again:
                    group_id = again.popleft()
                else:
                    drawn += 1
                    group_id = f"rl-{drawn:05d}"
                    ledger.draw_group(
                        group_id,
                        stage="rl",
                        domain="d",
                        task_id=f"t{drawn}",
                        split="train",
                        index=drawn,
                        version=Version(ledger.incarnation, step),
                        scheduler={"drawn": drawn},
                    )
                ledger.start_group(group_id)
                running.append(group_id)
            for group_id in running:
                record_trace(ledger, group_id)
                ledger.complete_group(group_id)
                if int(group_id[3:]) % drop_every == 0:
                    ledger.drop_group(group_id, "no_variance")
                else:
                    ready.append(group_id)
        chosen = [ready.popleft() for _ in range(PER_BATCH)]
        replays = [ReplayRow(f"{g}-0", g, 0.5) for g in before[-2:]]
        ledger.record_batch("rl", step, chosen, Version(ledger.incarnation, step), replays)
        weights += [*chosen, *map(again_of, replays)]
        ledger.mark_trained("rl", step)
        before += chosen
        if step % CHECKPOINT_EVERY == 0:
            disk.saved[f"{step}-{ledger.incarnation}"] = list(weights)
            ledger.record_checkpoint("rl", step, f"{step}-{ledger.incarnation}")
    for group in ledger.open_groups("rl"):
        ledger.drop_group(group.id, "stage_over")
    return weights


@pytest.fixture(scope="module")
def template() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    Ledger.open(folder / "template.sqlite").close()
    yield folder / "template.sqlite"
    shutil.rmtree(folder)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(kills=st.lists(st.integers(0, 400), max_size=6), drop_every=st.integers(2, 7))
def test_r28_any_kills_leave_each_group_in_one_final_state(
    template: Path, kills: list[int], drop_every: int
) -> None:
    path = template.with_name("run.sqlite")
    for old in path.parent.glob("run.sqlite*"):
        old.unlink()
    shutil.copy(template, path)
    disk, weights = Disk(), None
    for kill in [*kills, 10**9]:
        ledger = Ledger.open(path)
        try:
            with killed_after(ledger, kill):
                weights = train(ledger, disk, drop_every)
        except Killed:
            continue
        finally:
            ledger.close()
        break
    assert weights is not None
    reader = LedgerReader(path)
    groups = reader.groups("rl")
    assert {g.state for g in groups} <= {"trained", "dropped"}
    assert [g.ordinal for g in groups] == list(range(1, len(groups) + 1)), "no task is skipped"
    trained = [g.id for g in groups if g.state == "trained"]
    fresh = [one for one in weights if not one.startswith("again ")]
    assert sorted(fresh) == sorted(trained), "what the weights saw is what the record says, each once"
    assert len(fresh) == len(set(fresh)) == STEPS * PER_BATCH
    batches = reader.batches("rl")
    assert weights == [x for b in batches for x in [*(g.id for g in b.groups), *map(again_of, b.replays)]]
    replayed = reader.replay_counts()
    assert set(replayed) == {(row.trace_id, batch.step) for batch in batches for row in batch.replays}
    assert len(replayed) == 2 * (STEPS - 1), "each replayed use is in the record"
    assert all(first == 1 and again <= len(kills) for first, again in replayed.values())
    uses = reader.use_counts()
    assert set(uses) == set(trained)
    assert all(first == 1 and replays <= len(kills) for first, replays in uses.values())
    assert reader.resume_view("rl").scheduler == {"drawn": len(groups)}
    reader.close()
