"""The states of groups and batches, enforced in SQL.

    drawn → running → judged → complete → trained(step)
       └────────┴─────────┴────────┴────→ dropped(reason)

Each move names the states that it may start from in its ``WHERE``; a move that matches no row is refused.
A group in a recorded batch can no longer be dropped.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, exists, func, insert, select, update

from lehr.core.errors import LehrError
from lehr.core.trace import Version
from lehr.ledger.queries import OPEN_STATES
from lehr.ledger.rows import ReplayRow
from lehr.ledger.schema import batch_groups, batches, groups, replays, traces, uses


class IllegalMove(LehrError, RuntimeError):
    """A change of state that the record does not allow; nothing was changed."""

    code = "illegal_move"


def draw(db: Connection, group_id: str, stage: str, **columns: Any) -> int:
    """Insert a drawn group and return its ordinal in the stage."""
    if db.execute(select(groups.c.id).where(groups.c.id == group_id)).first() is not None:
        raise IllegalMove(f"group {group_id} was drawn already")
    last = db.execute(select(func.max(groups.c.ordinal)).where(groups.c.stage == stage)).scalar()
    ordinal = (last or 0) + 1
    row = {"id": group_id, "stage": stage, "ordinal": ordinal, "state": "drawn", "created": time.time()}
    db.execute(insert(groups).values(**row, **columns))
    return ordinal


def move(db: Connection, group_id: str, to: str, *, out_of: Sequence[str], **columns: Any) -> None:
    """Move one group, or raise :class:`IllegalMove` that names the state it is in."""
    query = update(groups).where(groups.c.id == group_id, groups.c.state.in_(out_of))
    if to == "dropped":
        query = query.where(~exists().where(batch_groups.c.group_id == groups.c.id))
    if db.execute(query.values(state=to, **columns)).rowcount == 1:
        return
    raise IllegalMove(
        f"group {group_id} cannot become {to}: it is {_describe(db, group_id)}",
        expected=f"a group that is {' or '.join(out_of)}",
    )


def drop(db: Connection, group_id: str, reason: str) -> None:
    """End a group that is not trained on."""
    move(db, group_id, "dropped", out_of=OPEN_STATES, reason=reason, ended=time.time())


def reopen(db: Connection, group_id: str) -> None:
    """Set a group that was running when the run died back to drawn."""
    move(db, group_id, "drawn", out_of=("drawn", "running", "judged"), retries=groups.c.retries + 1)


def record_batch(
    db: Connection,
    stage: str,
    step: int,
    ids: Sequence[str],
    version: Version,
    replayed: Sequence[ReplayRow] = (),
) -> None:
    """Bind complete groups, and traces of groups that an earlier step trained, to a step before it is taken."""
    known = db.execute(select(batches.c.state).where(batches.c.stage == stage, batches.c.step == step)).scalar()
    if known is not None:
        raise IllegalMove(f"step {step} of {stage} has a batch already, which is {known}")
    for group_id in ids:
        state = db.execute(select(groups.c.state).where(groups.c.id == group_id)).scalar()
        taken = db.execute(select(batch_groups.c.step).where(batch_groups.c.group_id == group_id)).scalar()
        if state != "complete" or taken is not None:
            raise IllegalMove(
                f"group {group_id} cannot enter step {step}: it is {_describe(db, group_id)}",
                expected="a complete group that is in no batch",
            )
    db.execute(
        insert(batches).values(
            stage=stage, step=step, state="recorded", policy_version=version.packed, recorded=time.time()
        )
    )
    if ids:
        rows = [{"group_id": g, "stage": stage, "step": step, "position": n} for n, g in enumerate(ids)]
        db.execute(insert(batch_groups), rows)
    for position, row in enumerate(replayed):
        _require_trained(db, stage, step, row)
        values = {"trace_id": row.trace_id, "group_id": row.group_id, "advantage": row.advantage}
        db.execute(insert(replays).values(stage=stage, step=step, position=position, **values))


def _require_trained(db: Connection, stage: str, step: int, row: ReplayRow) -> None:
    """Refuse to replay what was never trained, or a trace that is not of its group."""
    found = db.execute(
        select(groups.c.step)
        .join(traces, traces.c.group_id == groups.c.id)
        .where(groups.c.id == row.group_id, groups.c.stage == stage, traces.c.id == row.trace_id)
    ).scalar()
    if found is None or found >= step:
        raise IllegalMove(
            f"trace {row.trace_id} cannot be replayed in step {step}: group {row.group_id} of {stage} is "
            f"{_describe(db, row.group_id)}",
            expected="a trace of a group that an earlier step of the stage trained",
        )


def apply_batch(db: Connection, stage: str, step: int, *, replay: bool, incarnation: int) -> None:
    """Record that the step of a batch was taken: its groups are trained, and each use is noted, replayed ones
    too.

    A batch that was applied before may be applied again only as a replay.
    """
    found = db.execute(select(batches.c.state).where(batches.c.stage == stage, batches.c.step == step)).scalar()
    if found is None or (found == "applied" and not replay):
        raise IllegalMove(f"step {step} of {stage} cannot be trained: its batch is {found or 'not recorded'}")
    ids = list(
        db.execute(
            select(batch_groups.c.group_id)
            .where(batch_groups.c.stage == stage, batch_groups.c.step == step)
            .order_by(batch_groups.c.position)
        ).scalars()
    )
    now = time.time()
    if found == "recorded":
        for group_id in ids:
            move(db, group_id, "trained", out_of=("complete",), step=step, ended=now)
        db.execute(
            update(batches)
            .where(batches.c.stage == stage, batches.c.step == step)
            .values(state="applied", applied=now)
        )
    again = found == "applied"
    if ids:
        rows = [
            {"group_id": g, "step": step, "replay": again, "incarnation": incarnation, "at": now} for g in ids
        ]
        db.execute(insert(uses), rows)
    replayed = select(replays.c.trace_id, replays.c.group_id).where(
        replays.c.stage == stage, replays.c.step == step
    )
    for trace_id, group_id in db.execute(replayed.order_by(replays.c.position)).all():
        use = {"group_id": group_id, "trace_id": trace_id, "step": step, "replay": again}
        db.execute(insert(uses).values(**use, incarnation=incarnation, at=now))


def _describe(db: Connection, group_id: str) -> str:
    row = db.execute(
        select(groups.c.state, groups.c.step, groups.c.reason, batch_groups.c.step)
        .outerjoin(batch_groups, batch_groups.c.group_id == groups.c.id)
        .where(groups.c.id == group_id)
    ).first()
    if row is None:
        return "unknown"
    state, step, reason, batch = row
    if state == "trained":
        return f"trained at step {step}"
    if state == "dropped":
        return f"dropped ({reason})"
    return f"{state}, in the batch of step {batch}" if batch is not None else str(state)
