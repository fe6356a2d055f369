import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from lehr.core.errors import ConfigError, Failure, HostUnfit, OutOfSpace, StaleWriter
from lehr.core.trace import Version
from lehr.ledger.database import LedgerDamaged
from lehr.ledger.moves import IllegalMove
from lehr.ledger.reader import LedgerReader
from lehr.ledger.rows import ReplayRow
from lehr.ledger.store import Ledger

V = Version(1, 0)


def draw(ledger: Ledger, *ids: str, stage: str = "rl", **more: Any) -> None:
    for n, group_id in enumerate(ids):
        ledger.draw_group(
            group_id,
            stage=stage,
            domain="d",
            task_id=f"d@1/train/{n}",
            split="train",
            index=n,
            version=V,
            **more,
        )


def complete(ledger: Ledger, *ids: str) -> None:
    draw(ledger, *ids)
    for group_id in ids:
        ledger.start_group(group_id)
        ledger.complete_group(group_id)


def trace(ledger: Ledger, trace_id: str, group_id: str, attempt: int = 0, **more: Any) -> None:
    fields: dict[str, Any] = {
        "stage": "rl",
        "domain": "d",
        "task_id": "d@1/train/0",
        "blob": "b-" + trace_id,
        "valid": True,
        "value": 0.5,
        "passed": True,
    }
    ledger.record_trace(trace_id=trace_id, group_id=group_id, attempt=attempt, **{**fields, **more})


@pytest.fixture
def ledger(tmp_path: Path):
    ledger = Ledger.open(tmp_path / "ledger.sqlite", digest="abc")
    yield ledger
    ledger.close()


def read(ledger: Ledger) -> LedgerReader:
    return LedgerReader(ledger.path)


def test_a_group_walks_to_trained(ledger: Ledger) -> None:
    draw(ledger, "g")
    ledger.start_group("g")
    ledger.judge_group("g")
    ledger.complete_group("g")
    ledger.record_batch("rl", 1, ["g"], Version(1, 4))
    assert ledger.open_groups("rl") == ()
    ledger.mark_trained("rl", 1)
    (group,) = read(ledger).groups("rl")
    assert (group.state, group.step, group.reason, group.index) == ("trained", 1, None, 0)
    assert group.ended is not None
    (batch,) = read(ledger).batches("rl")
    assert (batch.applied, batch.policy_version, [g.id for g in batch.groups]) == (True, Version(1, 4), ["g"])
    assert read(ledger).use_counts() == {"g": (1, 0)}


@pytest.mark.parametrize("state", ["drawn", "running", "judged", "complete"])
def test_a_group_is_dropped_once_from_any_open_state(ledger: Ledger, state: str) -> None:
    draw(ledger, "g")
    path = (
        ("running", ledger.start_group),
        ("judged", ledger.judge_group),
        ("complete", ledger.complete_group),
    )
    for name, move in path:
        if read(ledger).groups("rl")[0].state != state:
            move("g")
            assert read(ledger).groups("rl")[0].state == name
    assert read(ledger).groups("rl")[0].state == state
    ledger.drop_group("g", "no_variance")
    for again in (
        lambda: ledger.drop_group("g", "stale"),
        lambda: ledger.start_group("g"),
        lambda: ledger.complete_group("g"),
        lambda: ledger.reopen_group("g"),
        lambda: ledger.record_batch("rl", 1, ["g"], V),
    ):
        with pytest.raises(IllegalMove, match=r"dropped \(no_variance\)"):
            again()
    assert read(ledger).group_states("rl") == {"dropped:no_variance": 1}


def test_a_trained_group_stays_trained(ledger: Ledger) -> None:
    complete(ledger, "g", "h")
    ledger.record_batch("rl", 3, ["g"], V)
    with pytest.raises(IllegalMove, match="in the batch of step 3"):
        ledger.drop_group("g", "stale")
    with pytest.raises(IllegalMove, match="in the batch of step 3"):
        ledger.record_batch("rl", 4, ["h", "g"], V)
    ledger.mark_trained("rl", 3)
    for again in (
        lambda: ledger.drop_group("g", "stale"),
        lambda: ledger.start_group("g"),
        lambda: ledger.record_batch("rl", 4, ["h", "g"], V),
    ):
        with pytest.raises(IllegalMove, match="trained at step 3"):
            again()
    with pytest.raises(IllegalMove, match="its batch is applied"):
        ledger.mark_trained("rl", 3)
    with pytest.raises(IllegalMove, match="not recorded"):
        ledger.mark_trained("rl", 4)
    with pytest.raises(IllegalMove, match="has a batch already"):
        ledger.record_batch("rl", 3, ["h"], V)
    assert [g.id for g in ledger.open_groups("rl")] == ["h"], "a refused batch leaves its groups free"


def test_a_move_out_of_order_is_refused(ledger: Ledger) -> None:
    draw(ledger, "g")
    with pytest.raises(IllegalMove, match="it is drawn"):
        ledger.complete_group("g")
    with pytest.raises(IllegalMove, match="it is drawn"):
        ledger.record_batch("rl", 1, ["g"], V)
    with pytest.raises(IllegalMove, match="it is unknown"):
        ledger.start_group("no such group")
    with pytest.raises(IllegalMove, match="drawn already"):
        draw(ledger, "g")


def test_sql_itself_refuses_two_ends(ledger: Ledger) -> None:
    complete(ledger, "g")
    ledger.record_batch("rl", 1, ["g"], V)
    ledger.mark_trained("rl", 1)
    with sqlite3.connect(ledger.path) as raw, pytest.raises(sqlite3.IntegrityError):
        raw.execute("UPDATE groups SET reason = 'stale' WHERE id = 'g'")
    raw.close()


def test_a_replay_is_recorded_as_a_use(ledger: Ledger) -> None:
    complete(ledger, "g", "h")
    ledger.record_batch("rl", 1, ["g"], V)
    ledger.mark_trained("rl", 1)
    ledger.record_batch("rl", 2, ["h"], V)
    ledger.close()
    again = Ledger.open(ledger.path)
    again.mark_trained("rl", 1, replay=True)
    again.mark_trained("rl", 2, replay=True)
    assert read(again).use_counts() == {"g": (1, 1), "h": (1, 0)}
    assert read(again).group_states("rl") == {"trained": 2}
    again.close()


def test_the_resume_view_says_where_a_stage_stands(ledger: Ledger) -> None:
    complete(ledger, "a", "b", "c")
    ledger.record_batch("rl", 1, ["b"], V)
    ledger.mark_trained("rl", 1)
    assert ledger.record_checkpoint("rl", 1, "rl-step-0001", {"scales": {"d": 2.0}}) is None
    ledger.record_batch("rl", 2, ["a"], V)
    draw(ledger, "d", scheduler={"drawn": 3})
    ledger.start_group("d")
    draw(ledger, "e", scheduler={"drawn": 4})
    draw(ledger, "other", stage="rl2", scheduler={"drawn": 9})
    ledger.close()
    again = Ledger.open(ledger.path, digest="abc")
    view = again.resume_view("rl")
    assert view.drawn == 5
    assert view.scheduler == {"drawn": 4}
    assert view.checkpoint is not None
    assert (view.checkpoint.step, view.checkpoint.path, view.checkpoint.state) == (
        1,
        "rl-step-0001",
        {"scales": {"d": 2.0}},
    )
    assert [(b.step, b.applied, [g.id for g in b.groups]) for b in view.batches] == [
        (1, True, ["b"]),
        (2, False, ["a"]),
    ]
    assert [(g.id, g.state) for g in view.open_groups] == [("c", "complete"), ("d", "running"), ("e", "drawn")]
    again.reopen_group("d")
    assert [(g.id, g.state, g.retries) for g in again.open_groups("rl")] == [
        ("c", "complete", 0),
        ("d", "drawn", 1),
        ("e", "drawn", 0),
    ]
    assert again.record_checkpoint("rl", 2, "rl-step-0002") == "rl-step-0001"
    empty = again.resume_view("nothing")
    assert (empty.drawn, empty.checkpoint, empty.scheduler, empty.batches) == (0, None, {}, ())
    again.close()


def test_the_scheduler_state_can_follow_an_outcome(ledger: Ledger) -> None:
    draw(ledger, "g", scheduler={"rate": 0})
    ledger.start_group("g")
    ledger.complete_group("g", scheduler={"rate": 1})
    assert ledger.resume_view("rl").scheduler == {"rate": 1}


def test_the_traces_of_an_earlier_start_no_longer_count(ledger: Ledger) -> None:
    draw(ledger, "g")
    ledger.start_group("g")
    trace(ledger, "g-0", "g", 0)
    trace(ledger, "g-1", "g", 1)
    ledger.reopen_group("g")
    ledger.start_group("g")
    trace(ledger, "g-1-r1", "g", 1)
    trace(ledger, "g-0-r1", "g", 0)
    assert ledger.trace_blobs("g") == ["b-g-0-r1", "b-g-1-r1"]
    assert len(read(ledger).traces("rl")) == 4


def test_a_trace_is_replaced_until_its_group_is_complete(ledger: Ledger) -> None:
    draw(ledger, "g")
    ledger.start_group("g")
    trace(ledger, "g-0", "g")
    trace(ledger, "g-0", "g", valid=False, value=None, passed=False, reason="sandbox", blob="new")
    (row,) = read(ledger).traces()
    assert (row.valid, row.value, row.reason, row.blob) == (False, None, "sandbox", "new")
    assert read(ledger).failures() == {"sandbox": 1}
    ledger.complete_group("g")
    with pytest.raises(IllegalMove, match="comes too late"):
        trace(ledger, "g-0", "g")
    trace(ledger, "free", "of a group that is not in the record", stage="base", parts={"a": 1.0}, turns=3)
    (row,) = read(ledger).traces("base")
    assert (row.parts, row.turns, row.valid) == ({"a": 1.0}, 3, True)


def test_evaluations_are_kept_once_per_task(ledger: Ledger) -> None:
    for passed in (False, True):
        for n in range(3):
            ledger.record_evaluation(
                label="base",
                domain="d",
                task_id=f"t{n}",
                trace_id=f"x{n}",
                passed=passed and n == 0,
                valid=n != 2,
                blob="b",
            )
    assert ledger.evaluated("base") == {"t0": True, "t1": False, "t2": False}
    assert ledger.evaluated("rl") == {}
    rows = read(ledger).evaluations("base")
    assert [(r.task_id, r.passed, r.valid) for r in rows] == [
        ("t0", True, True),
        ("t1", False, True),
        ("t2", False, False),
    ]


def test_stages_keep_their_seconds_over_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.time", lambda: now[0])
    path = tmp_path / "l.sqlite"
    first = Ledger.open(path)
    first.begin_stage("sft")
    now[0] += 10
    first.event("alive")
    first.close()  # the process dies here
    now[0] += 5000
    second = Ledger.open(path)
    assert second.incarnation == 2
    assert not second.stage_done("sft")
    second.begin_stage("sft")
    now[0] += 7
    second.end_stage("sft")
    now[0] += 100
    assert second.stage_done("sft")
    assert second.stage_seconds("sft") == 17
    assert second.stage_seconds("never") == 0
    with pytest.raises(IllegalMove):
        second.begin_stage("sft")
    with pytest.raises(IllegalMove):
        second.end_stage("sft")
    second.begin_stage("rl")
    assert [(s.name, s.state, s.seconds) for s in read(second).stages()] == [
        ("sft", "done", 17.0),
        ("rl", "running", 0.0),
    ]
    second.close()


def test_a_stale_writer_is_refused_and_changes_nothing(ledger: Ledger) -> None:
    draw(ledger, "g")
    newer = Ledger.open(ledger.path, digest="abc")
    assert newer.incarnation == ledger.incarnation + 1
    for write in (
        lambda: draw(ledger, "h"),
        lambda: ledger.start_group("g"),
        lambda: ledger.event("late"),
        lambda: ledger.record_batch("rl", 1, [], V),
        lambda: ledger.begin_stage("rl"),
        lambda: trace(ledger, "t", "g"),
        lambda: ledger.record_checkpoint("rl", 1, "x"),
    ):
        with pytest.raises(StaleWriter):
            write()
    assert [g.id for g in newer.open_groups("rl")] == ["g"]
    newer.start_group("g")
    assert read(newer).events() == ()
    newer.close()


def test_another_config_is_refused(ledger: Ledger) -> None:
    with pytest.raises(ConfigError, match="under config abc, not xyz"):
        Ledger.open(ledger.path, digest="xyz")
    ledger.event("still the owner")


def test_writes_together_are_one_transaction(ledger: Ledger) -> None:
    with pytest.raises(IllegalMove), ledger.together():
        draw(ledger, "g")
        ledger.event("drawn")
        ledger.start_group("unknown")
    assert ledger.open_groups("rl") == ()
    with ledger.together():
        draw(ledger, "g")
        ledger.start_group("g")
    assert read(ledger).group_states("rl") == {"running": 1}


def test_events_come_back_in_order(ledger: Ledger) -> None:
    ledger.event("rl.starved", step=3, failure=str(Failure("x")))
    ledger.event("other", path=Path("/x"))
    assert [(e.kind, e.incarnation) for e in read(ledger).events()] == [("rl.starved", 1), ("other", 1)]
    assert read(ledger).events("rl.starved")[0].fields["step"] == 3


def test_a_reader_never_bumps_the_fence_and_cannot_write(ledger: Ledger) -> None:
    draw(ledger, "g")
    ledger.close()
    reader = LedgerReader(ledger.path)
    assert (reader.incarnation(), reader.digest()) == (1, "abc")
    with reader._read() as db, pytest.raises(Exception, match=r"readonly|read-only|attempt to write"):
        db.execute(text("DELETE FROM groups"))
    reader.close()
    assert LedgerReader(ledger.path).group_states("rl") == {"drawn": 1}


def test_a_dead_run_can_be_read_from_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    program = f"""
import os
from pathlib import Path
from lehr.ledger.store import Ledger
ledger = Ledger.open(Path({str(tmp_path / "l.sqlite")!r}))
ledger.event("last")
os._exit(9)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    assert (tmp_path / "l.sqlite-wal").stat().st_size > 0
    assert [e.kind for e in LedgerReader(tmp_path / "l.sqlite").events()] == ["last"]


def test_what_is_not_a_ledger_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with pytest.raises(ConfigError, match="no ledger at"):
        LedgerReader(path)
    path.write_bytes(b"this is not a database, it is a text of some length" * 100)
    for opening in (lambda: LedgerReader(path), lambda: Ledger.open(path)):
        with pytest.raises(LedgerDamaged, match="not a database"):
            opening()
    with pytest.raises(HostUnfit, match="cannot be opened"):
        Ledger.open(tmp_path / "no" / "such" / "folder" / "l.sqlite")


def test_a_ledger_of_a_newer_lehr_is_refused(ledger: Ledger) -> None:
    ledger.close()
    engine = create_engine(f"sqlite:///{ledger.path}")
    with engine.begin() as db:
        db.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    engine.dispose()
    with pytest.raises(ConfigError, match="newer lehr"):
        Ledger.open(ledger.path)
    with pytest.raises(ConfigError, match="version 9999"):
        LedgerReader(ledger.path)


def test_a_full_disk_is_named_and_keeps_what_was_committed(ledger: Ledger) -> None:
    draw(ledger, "g")
    with ledger._read() as db:
        pages = db.execute(text("PRAGMA page_count")).scalar()
        db.execute(text(f"PRAGMA max_page_count = {pages}"))
    with pytest.raises(OutOfSpace, match="intact"):
        for n in range(100):
            ledger.event("large", text="x" * 20_000, n=n)
    with ledger._read() as db:
        db.execute(text("PRAGMA max_page_count = 1000000"))
    ledger.start_group("g")
    assert read(ledger).group_states("rl") == {"running": 1}


def test_opening_again_loads_no_migration_tool(ledger: Ledger) -> None:
    program = f"""
import sys
from pathlib import Path
from lehr.ledger.store import Ledger
Ledger.open(Path({str(ledger.path)!r})).close()
assert "alembic" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_commits_survive_the_loss_of_power(ledger: Ledger) -> None:
    with ledger._read() as db:
        assert db.execute(text("PRAGMA synchronous")).scalar() == 2
        assert db.execute(text("PRAGMA journal_mode")).scalar() == "wal"
        assert db.execute(text("PRAGMA foreign_keys")).scalar() == 1


def test_only_a_trace_that_was_trained_before_can_be_replayed_and_once_a_step(tmp_path: Path) -> None:
    ledger = Ledger.open(tmp_path / "l.sqlite")
    version = Version(1, 0)
    for number in (1, 2):
        name = f"g{number}"
        row = {"stage": "rl", "domain": "d", "task_id": "t"}
        ledger.draw_group(name, **row, split="train", index=number, version=version)
        ledger.start_group(name)
        ledger.record_trace(
            trace_id=f"{name}-0", group_id=name, attempt=0, blob="", valid=True, value=1, passed=True, **row
        )
        ledger.complete_group(name)
    with pytest.raises(IllegalMove, match=r"g1-0 cannot be replayed in step 1: group g1 .* is complete"):
        ledger.record_batch("rl", 1, ["g2"], version, [ReplayRow("g1-0", "g1", 0.5)])
    ledger.record_batch("rl", 1, ["g1"], version)
    ledger.mark_trained("rl", 1)
    again = ReplayRow("g1-0", "g1", 0.5)
    for wrong in (ReplayRow("g2-0", "g1", 0.5), ReplayRow("none", "g1", 0.5)):
        with pytest.raises(IllegalMove, match="cannot be replayed in step 2"):
            ledger.record_batch("rl", 2, ["g2"], version, [wrong])
    with pytest.raises(Exception, match="UNIQUE"):
        ledger.record_batch("rl", 2, ["g2"], version, [again, again])
    ledger.record_batch("rl", 2, ["g2"], version, [again])
    ledger.mark_trained("rl", 2)
    (_, second) = ledger.resume_view("rl").batches
    assert second.replays == (again,)
    ledger.close()
