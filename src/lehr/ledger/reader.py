"""Reads the record of a run, running or dead, and never changes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, func, select

from lehr.ledger import queries
from lehr.ledger.database import named_errors, open_reader
from lehr.ledger.rows import (
    BatchRow,
    CheckpointRow,
    EvaluationRow,
    EventRow,
    GroupRow,
    ResumeView,
    StageRow,
    TraceRow,
    checkpoint_row,
    evaluation_row,
    event_row,
    group_row,
    trace_row,
)
from lehr.ledger.schema import checkpoints, evaluations, events, groups, run, traces, uses


class LedgerReader:
    """Questions to a ledger. Each is answered from the newest committed state."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._engine = open_reader(path)

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._engine.dispose()

    def digest(self) -> str:
        """Return the digest of the run's config."""
        with self._read() as db:
            return db.execute(select(run.c.digest)).scalar() or ""

    def incarnation(self) -> int:
        """Return how often the run was started."""
        with self._read() as db:
            return db.execute(select(run.c.incarnation)).scalar() or 0

    def last_write(self) -> float:
        """Return when the run last wrote, in seconds since the epoch."""
        with self._read() as db:
            return db.execute(select(run.c.touched)).scalar() or 0.0

    def stages(self) -> tuple[StageRow, ...]:
        """Return stages and measurements in the order in which they began."""
        with self._read() as db:
            return queries.stage_rows(db)

    def groups(self, stage: str | None = None) -> tuple[GroupRow, ...]:
        """Return groups in the order in which they were drawn."""
        query = select(groups).order_by(groups.c.created, groups.c.ordinal)
        if stage is not None:
            query = query.where(groups.c.stage == stage)
        with self._read() as db:
            return tuple(group_row(row) for row in db.execute(query).mappings())

    def traces(
        self, stage: str | None = None, domain: str | None = None, *, limit: int | None = None
    ) -> tuple[TraceRow, ...]:
        """Return judged attempts, oldest first. Attempts that a restart replaced are among them."""
        query = select(traces).order_by(traces.c.created, traces.c.id).limit(limit)
        if stage is not None:
            query = query.where(traces.c.stage == stage)
        if domain is not None:
            query = query.where(traces.c.domain == domain)
        with self._read() as db:
            return tuple(trace_row(row) for row in db.execute(query).mappings())

    def batches(self, stage: str) -> tuple[BatchRow, ...]:
        """Return the recorded batches of ``stage`` by step."""
        with self._read() as db:
            return queries.batches_of(db, stage)

    def checkpoints(self) -> tuple[CheckpointRow, ...]:
        """Return every recorded checkpoint."""
        query = select(checkpoints).order_by(checkpoints.c.stage, checkpoints.c.step)
        with self._read() as db:
            return tuple(checkpoint_row(row) for row in db.execute(query).mappings())

    def evaluations(self, label: str | None = None) -> tuple[EvaluationRow, ...]:
        """Return measured tasks."""
        query = select(evaluations).order_by(evaluations.c.label, evaluations.c.domain, evaluations.c.task_id)
        if label is not None:
            query = query.where(evaluations.c.label == label)
        with self._read() as db:
            return tuple(evaluation_row(row) for row in db.execute(query).mappings())

    def failures(self) -> Counter[str]:
        """Return how many attempts could not be judged, by cause."""
        query = select(traces.c.reason, func.count()).where(traces.c.reward_kind == "invalid")
        with self._read() as db:
            return Counter({reason: n for reason, n in db.execute(query.group_by(traces.c.reason))})

    def group_states(self, stage: str) -> Counter[str]:
        """Return how many groups are in each state; dropped ones as ``dropped:<reason>``."""
        return Counter(f"dropped:{g.reason}" if g.state == "dropped" else g.state for g in self.groups(stage))

    def use_counts(self) -> dict[str, tuple[int, int]]:
        """Return for each trained group how often it was used: first uses, and replays after a crash."""
        counts: dict[str, tuple[int, int]] = {}
        query = select(uses.c.group_id, uses.c.replay, func.count()).where(uses.c.trace_id.is_(None))
        query = query.group_by(uses.c.group_id, uses.c.replay)
        with self._read() as db:
            for group_id, replay, number in db.execute(query):
                first, again = counts.get(group_id, (0, 0))
                counts[group_id] = (first, again + number) if replay else (first + number, again)
        return counts

    def replay_counts(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Return for each trace and each step that replayed it: uses, and uses again after a crash."""
        counts: dict[tuple[str, int], tuple[int, int]] = {}
        query = select(uses.c.trace_id, uses.c.step, uses.c.replay).where(uses.c.trace_id.is_not(None))
        with self._read() as db:
            for trace_id, step, replay in db.execute(query):
                first, again = counts.get((trace_id, step), (0, 0))
                counts[trace_id, step] = (first, again + 1) if replay else (first + 1, again)
        return counts

    def events(self, kind: str | None = None) -> tuple[EventRow, ...]:
        """Return events in the order in which they were recorded."""
        query = select(events).order_by(events.c.id)
        if kind is not None:
            query = query.where(events.c.kind == kind)
        with self._read() as db:
            return tuple(event_row(row) for row in db.execute(query).mappings())

    def resume_view(self, stage: str) -> ResumeView:
        """Return where ``stage`` stands."""
        with self._read() as db:
            return queries.resume_view(db, stage)

    @contextmanager
    def _read(self) -> Generator[Connection]:
        with named_errors(self.path, "read"), self._engine.connect() as db:
            yield db
