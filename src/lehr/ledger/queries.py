"""Questions to a ledger, shared by its writer and its readers."""

from __future__ import annotations

import json

from sqlalchemy import Connection, exists, func, select

from lehr.core.trace import Version
from lehr.ledger.rows import BatchRow, GroupRow, ReplayRow, ResumeView, StageRow, checkpoint_row, group_row
from lehr.ledger.schema import (
    batch_groups,
    batches,
    checkpoints,
    groups,
    replays,
    run,
    scheduler_states,
    stage_spans,
    stages,
)

OPEN_STATES = ("drawn", "running", "judged", "complete")


def open_groups(db: Connection, stage: str) -> tuple[GroupRow, ...]:
    """Return the groups of ``stage`` that are neither final nor in a recorded batch, as drawn."""
    chosen = exists().where(batch_groups.c.group_id == groups.c.id)
    found = db.execute(
        select(groups)
        .where(groups.c.stage == stage, groups.c.state.in_(OPEN_STATES), ~chosen)
        .order_by(groups.c.ordinal)
    )
    return tuple(group_row(row) for row in found.mappings())


def batches_of(db: Connection, stage: str) -> tuple[BatchRow, ...]:
    """Return the recorded batches of ``stage`` by step."""
    members: dict[int, list[GroupRow]] = {}
    joined = (
        select(groups, batch_groups.c.step.label("batch_step"))
        .join(batch_groups, batch_groups.c.group_id == groups.c.id)
        .where(batch_groups.c.stage == stage)
        .order_by(batch_groups.c.step, batch_groups.c.position)
    )
    for row in db.execute(joined).mappings():
        fields = dict(row)
        step = fields.pop("batch_step")
        members.setdefault(step, []).append(group_row(fields))  # pyright: ignore[reportArgumentType]
    again: dict[int, list[ReplayRow]] = {}
    replayed = select(replays).where(replays.c.stage == stage).order_by(replays.c.step, replays.c.position)
    for row in db.execute(replayed).mappings():
        again.setdefault(row["step"], []).append(ReplayRow(row["trace_id"], row["group_id"], row["advantage"]))
    found = db.execute(select(batches).where(batches.c.stage == stage).order_by(batches.c.step)).mappings()
    return tuple(
        BatchRow(
            stage,
            row["step"],
            row["state"] == "applied",
            Version.unpack(row["policy_version"]),
            tuple(members.get(row["step"], ())),
            tuple(again.get(row["step"], ())),
        )
        for row in found
    )


def resume_view(db: Connection, stage: str) -> ResumeView:
    """Return everything that a stage needs to go on."""
    drawn = db.execute(select(func.max(groups.c.ordinal)).where(groups.c.stage == stage)).scalar()
    last = db.execute(
        select(checkpoints).where(checkpoints.c.stage == stage).order_by(checkpoints.c.step.desc()).limit(1)
    ).mappings()
    checkpoint = next((checkpoint_row(row) for row in last), None)
    state = db.execute(select(scheduler_states.c.state_json).where(scheduler_states.c.stage == stage)).scalar()
    return ResumeView(
        drawn or 0,
        checkpoint,
        json.loads(state) if state else {},
        batches_of(db, stage),
        open_groups(db, stage),
    )


def stage_rows(db: Connection) -> tuple[StageRow, ...]:
    """Return stages in the order in which they were begun. An open one counts up to the last write."""
    touched = db.execute(select(run.c.touched)).scalar() or 0.0
    spans: dict[str, list[tuple[float, float | None]]] = {}
    for stage, started, ended in db.execute(
        select(stage_spans.c.stage, stage_spans.c.started, stage_spans.c.ended).order_by(stage_spans.c.id)
    ):
        spans.setdefault(stage, []).append((started, ended))
    found = db.execute(select(stages).order_by(stages.c.position)).mappings()
    return tuple(
        StageRow(
            row["name"],
            row["position"],
            row["state"],
            row["detail"],
            spans[row["name"]][0][0],
            spans[row["name"]][-1][1],
            sum(max(0.0, (touched if end is None else end) - start) for start, end in spans[row["name"]]),
        )
        for row in found
    )
