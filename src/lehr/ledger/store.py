"""The one writer of a run's record.

Opening a ledger takes it over: the incarnation grows, and every write carries it, so that a process that
was thought dead and comes back is refused (``StaleWriter``). Each method is one durable transaction of a
few milliseconds; :meth:`Ledger.together` makes several of them one.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, func, insert, select, update
from sqlalchemy.dialects.sqlite import insert as upsert

from lehr.core.errors import ConfigError, StaleWriter
from lehr.core.task import Split
from lehr.core.trace import Version
from lehr.ledger import moves, queries
from lehr.ledger.database import named_errors, open_writer
from lehr.ledger.moves import IllegalMove
from lehr.ledger.rows import GroupRow, ReplayRow, ResumeView
from lehr.ledger.schema import (
    checkpoints,
    evaluations,
    events,
    groups,
    run,
    scheduler_states,
    stage_spans,
    stages,
    traces,
)


class Ledger:
    """The record of one run. Open with :meth:`open`, end with :meth:`close`."""

    def __init__(self, path: Path, digest: str) -> None:
        self.path = path
        self._lock = threading.RLock()
        self._open: Connection | None = None
        self._engine = open_writer(path)
        try:
            self.incarnation = self._take_over(digest)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(cls, path: Path, *, digest: str = "") -> Ledger:
        """Create or take over the ledger at ``path``.

        digest: of the run's resolved config; another one than was recorded is refused.
        """
        return cls(path, digest)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._engine.dispose()

    @contextmanager
    def together(self) -> Generator[None]:
        """Make the writes of the block one transaction. Nothing may be awaited inside it."""
        with self._write():
            yield

    # ---- stages

    def begin_stage(self, name: str, detail: str = "") -> None:
        """Note that ``name`` begins, or goes on after a crash."""
        with self._write() as db:
            state = db.execute(select(stages.c.state).where(stages.c.name == name)).scalar()
            if state == "done":
                raise IllegalMove(f"stage {name!r} is done already")
            if state is None:
                position = (db.execute(select(func.max(stages.c.position))).scalar() or 0) + 1
                row = {"name": name, "position": position, "state": "running", "detail": detail}
                db.execute(insert(stages).values(**row))
            self._end_spans(db, time.time(), stage=name)
            span = {"stage": name, "incarnation": self.incarnation, "started": time.time()}
            db.execute(insert(stage_spans).values(**span))

    def end_stage(self, name: str) -> None:
        """Note that ``name`` is done."""
        with self._write() as db:
            done = update(stages).where(stages.c.name == name, stages.c.state == "running")
            if db.execute(done.values(state="done")).rowcount != 1:
                raise IllegalMove(f"stage {name!r} cannot end: it is not running")
            self._end_spans(db, time.time(), stage=name)

    def stage_done(self, name: str) -> bool:
        """Return whether ``name`` ended."""
        with self._read() as db:
            return db.execute(select(stages.c.state).where(stages.c.name == name)).scalar() == "done"

    def stage_seconds(self, name: str) -> float:
        """Return the seconds spent in ``name`` over all starts of the run, 0 if it never began."""
        with self._read() as db:
            return next((row.seconds for row in queries.stage_rows(db) if row.name == name), 0.0)

    # ---- groups

    def draw_group(
        self,
        group_id: str,
        *,
        stage: str,
        domain: str,
        task_id: str,
        split: Split,
        index: int,
        version: Version,
        scheduler: Mapping[str, Any] | None = None,
    ) -> None:
        """Record a drawn group and, in the same transaction, the scheduler's state after the draw."""
        with self._write() as db:
            columns = {"domain": domain, "task_id": task_id, "split": split, "task_index": index}
            ordinal = moves.draw(db, group_id, stage, drawn_version=version.packed, **columns)
            if scheduler is not None:
                state = {"drawn": ordinal, "state_json": json.dumps(scheduler)}
                row = upsert(scheduler_states).values(stage=stage, **state)
                db.execute(row.on_conflict_do_update(index_elements=["stage"], set_=state))

    def start_group(self, group_id: str) -> None:
        """Drawn → running."""
        with self._write() as db:
            moves.move(db, group_id, "running", out_of=("drawn",))

    def judge_group(self, group_id: str) -> None:
        """Running → judged: every attempt has its reward."""
        with self._write() as db:
            moves.move(db, group_id, "judged", out_of=("running",))

    def complete_group(self, group_id: str, *, scheduler: Mapping[str, Any] | None = None) -> None:
        """Running or judged → complete: it may enter a batch. ``scheduler``: its state with the outcome."""
        with self._write() as db:
            moves.move(db, group_id, "complete", out_of=("running", "judged"))
            if scheduler is not None:
                stage = select(groups.c.stage).where(groups.c.id == group_id).scalar_subquery()
                row = update(scheduler_states).where(scheduler_states.c.stage == stage)
                db.execute(row.values(state_json=json.dumps(scheduler)))

    def drop_group(self, group_id: str, reason: str) -> None:
        """End a group that is in no batch, with the reason."""
        with self._write() as db:
            moves.drop(db, group_id, reason)

    def reopen_group(self, group_id: str) -> None:
        """Set a group that was running in a dead run back to drawn; its old traces no longer count."""
        with self._write() as db:
            moves.reopen(db, group_id)

    def open_groups(self, stage: str) -> tuple[GroupRow, ...]:
        """Return the groups of ``stage`` that are neither final nor in a recorded batch."""
        with self._read() as db:
            return queries.open_groups(db, stage)

    # ---- traces

    def record_trace(
        self,
        *,
        trace_id: str,
        group_id: str,
        attempt: int,
        stage: str,
        domain: str,
        task_id: str,
        blob: str,
        valid: bool,
        value: float | None,
        passed: bool,
        reason: str = "",
        detail: str = "",
        parts: Mapping[str, float] | None = None,
        own_tokens: int = 0,
        prompt_tokens: int = 0,
        turns: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """Record a judged attempt whose blob is stored. The same id again replaces what was recorded, as
        long as its group is not complete.
        """
        with self._write() as db:
            found = db.execute(select(groups.c.state, groups.c.retries).where(groups.c.id == group_id)).first()
            state, retry = (found[0], found[1]) if found is not None else (None, 0)
            if state not in (None, "drawn", "running", "judged"):
                raise IllegalMove(f"trace {trace_id} comes too late: its group is {state}")
            columns = {
                "group_id": group_id,
                "attempt": attempt,
                "retry": retry,
                "stage": stage,
                "domain": domain,
                "task_id": task_id,
                "blob": blob,
                "reward_kind": "valid" if valid else "invalid",
                "value": value if valid else None,
                "passed": passed,
                "reason": reason,
                "detail": detail,
                "parts_json": json.dumps(dict(parts or {})),
                "own_tokens": own_tokens,
                "prompt_tokens": prompt_tokens,
                "turns": turns,
                "seconds": seconds,
                "incarnation": self.incarnation,
                "created": time.time(),
            }
            row = upsert(traces).values(id=trace_id, **columns)
            db.execute(row.on_conflict_do_update(index_elements=["id"], set_=columns))

    def trace_blobs(self, group_id: str) -> list[str]:
        """Return the blobs of the group's attempts since it was last started, by attempt."""
        with self._read() as db:
            found = db.execute(
                select(traces.c.blob)
                .join(groups, groups.c.id == traces.c.group_id)
                .where(groups.c.id == group_id, traces.c.retry == groups.c.retries)
                .order_by(traces.c.attempt)
            )
            return list(found.scalars())

    # ---- batches, checkpoints

    def record_batch(
        self,
        stage: str,
        step: int,
        group_ids: Sequence[str],
        version: Version,
        replays: Sequence[ReplayRow] = (),
    ) -> None:
        """Bind complete groups, and what is replayed, to ``step``, durably, before the step is taken."""
        with self._write() as db:
            moves.record_batch(db, stage, step, group_ids, version, replays)

    def mark_trained(self, stage: str, step: int, *, replay: bool = False) -> None:
        """Record that the step was taken. ``replay``: a batch of a dead run was applied (again)."""
        with self._write() as db:
            moves.apply_batch(db, stage, step, replay=replay, incarnation=self.incarnation)

    def record_checkpoint(
        self, stage: str, step: int, path: str, state: Mapping[str, Any] | None = None
    ) -> str | None:
        """Record a complete checkpoint and return the path of the stage's previous one."""
        with self._write() as db:
            last = select(checkpoints.c.path).where(checkpoints.c.stage == stage)
            previous = db.execute(last.order_by(checkpoints.c.step.desc()).limit(1)).scalar()
            columns = {"path": path, "state_json": json.dumps(dict(state or {})), "created": time.time()}
            row = upsert(checkpoints).values(stage=stage, step=step, **columns)
            db.execute(row.on_conflict_do_update(index_elements=["stage", "step"], set_=columns))
            return previous

    def resume_view(self, stage: str) -> ResumeView:
        """Return where ``stage`` stands: its last checkpoint, its batches, its open groups."""
        with self._read() as db:
            return queries.resume_view(db, stage)

    # ---- evaluations, events

    def record_evaluation(
        self,
        *,
        label: str,
        domain: str,
        task_id: str,
        trace_id: str,
        passed: bool,
        valid: bool,
        blob: str,
        version: Version | None = None,
    ) -> None:
        """Record one measured task; the same task under the same label replaces it."""
        columns = {"domain": domain, "trace_id": trace_id, "blob": blob, "passed": passed, "valid": valid}
        with self._write() as db:
            packed = None if version is None else version.packed
            values = {**columns, "version": packed, "created": time.time()}
            row = upsert(evaluations).values(label=label, task_id=task_id, **values)
            db.execute(row.on_conflict_do_update(index_elements=["label", "task_id"], set_=values))

    def evaluated(self, label: str) -> dict[str, bool]:
        """Return whether each task that was measured under ``label`` passed."""
        with self._read() as db:
            chosen = select(evaluations.c.task_id, evaluations.c.passed).where(evaluations.c.label == label)
            return {task: bool(passed) for task, passed in db.execute(chosen)}

    def event(self, kind: str, /, **fields: Any) -> None:
        """Record one event."""
        with self._write() as db:
            text = json.dumps(fields, default=str)
            row = {"kind": kind, "fields_json": text, "incarnation": self.incarnation, "at": time.time()}
            db.execute(insert(events).values(**row))

    # ---- the fence

    def _take_over(self, digest: str) -> int:
        now = time.time()
        with self._read() as db:
            found = db.execute(select(run.c.digest, run.c.incarnation, run.c.touched)).first()
            if found is None:
                row = {"id": 1, "digest": digest, "incarnation": 1, "created": now, "touched": now}
                db.execute(insert(run).values(**row))
                return 1
            known, incarnation, touched = found
            if digest and known and digest != known:
                raise ConfigError(f"{self.path} was written under config {known}, not {digest}")
            self._end_spans(db, touched)
            db.execute(update(run).values(incarnation=incarnation + 1, touched=now))
            return incarnation + 1

    def _end_spans(self, db: Connection, at: float, stage: str | None = None) -> None:
        open_spans = update(stage_spans).where(stage_spans.c.ended.is_(None))
        if stage is not None:
            open_spans = open_spans.where(stage_spans.c.stage == stage)
        db.execute(open_spans.values(ended=at))

    @contextmanager
    def _read(self) -> Generator[Connection]:
        with self._lock:
            if self._open is not None:
                yield self._open
                return
            with named_errors(self.path, "written"), self._engine.begin() as db:
                self._open = db
                try:
                    yield db
                finally:
                    self._open = None

    @contextmanager
    def _write(self) -> Generator[Connection]:
        with self._read() as db:
            mine = update(run).where(run.c.incarnation == self.incarnation)
            if db.execute(mine.values(touched=time.time())).rowcount != 1:
                raise StaleWriter(
                    f"{self.path} was taken over by a newer start of the run",
                    hint="This process must end; the newer one goes on.",
                )
            yield db
