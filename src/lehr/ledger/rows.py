"""What is read from a ledger: one frozen class per table that others look at."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import RowMapping

from lehr.core.trace import Version


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A drawn group. ``step`` is set when it was trained, ``reason`` when it was dropped.

    index: of the task within its split. retries: how often it was started again after a crash.
    """

    id: str
    stage: str
    ordinal: int
    domain: str
    task_id: str
    split: str
    index: int
    state: str
    reason: str | None
    step: int | None
    drawn_version: Version
    retries: int
    created: float
    ended: float | None


@dataclass(frozen=True, slots=True)
class TraceRow:
    """A judged attempt. ``value`` is None exactly when the reward is invalid; then ``reason`` says why."""

    id: str
    group_id: str
    attempt: int
    retry: int
    stage: str
    domain: str
    task_id: str
    blob: str
    value: float | None
    passed: bool
    reason: str
    detail: str
    parts: Mapping[str, float]
    own_tokens: int
    prompt_tokens: int
    turns: int
    seconds: float
    created: float

    @property
    def valid(self) -> bool:
        """Whether the attempt could be judged."""
        return self.value is not None


@dataclass(frozen=True, slots=True)
class ReplayRow:
    """A trace of a group that was trained before, which a later step trains again.

    advantage: of each of its own tokens, the weight for how likely it was drawn folded in.
    """

    trace_id: str
    group_id: str
    advantage: float


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A recorded batch, its groups and what it replays in their order. ``applied`` is False between record and
    step.
    """

    stage: str
    step: int
    applied: bool
    policy_version: Version
    groups: tuple[GroupRow, ...]
    replays: tuple[ReplayRow, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A resumable checkpoint inside a stage. ``state`` is what the stage keeps beside the weights."""

    stage: str
    step: int
    path: str
    state: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One measured task. Where ``valid`` is False it could not be judged and counts nowhere."""

    label: str
    domain: str
    task_id: str
    trace_id: str
    blob: str
    passed: bool
    valid: bool


@dataclass(frozen=True, slots=True)
class StageRow:
    """A stage or a measurement. ``seconds`` is the time spent in it, over all starts of the run."""

    name: str
    position: int
    state: str
    detail: str
    started: float
    ended: float | None
    seconds: float


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that a component reported."""

    kind: str
    at: float
    incarnation: int
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ResumeView:
    """Where a stage stands. ``batches`` come in order of their steps, trained or not; ``open_groups`` are
    in no batch and in no final state; ``drawn`` counts every group ever drawn in the stage.
    """

    drawn: int
    checkpoint: CheckpointRow | None = None
    scheduler: Mapping[str, Any] = field(default_factory=dict[str, Any])
    batches: tuple[BatchRow, ...] = ()
    open_groups: tuple[GroupRow, ...] = ()


def group_row(row: RowMapping) -> GroupRow:
    """Return a row of ``groups``."""
    fields = dict(row)
    fields["index"] = fields.pop("task_index")
    fields["drawn_version"] = Version.unpack(fields["drawn_version"])
    return GroupRow(**fields)


def trace_row(row: RowMapping) -> TraceRow:
    """Return a row of ``traces``."""
    fields = {name: value for name, value in row.items() if name not in ("reward_kind", "incarnation")}
    fields["parts"] = json.loads(fields.pop("parts_json"))
    return TraceRow(**fields)


def checkpoint_row(row: RowMapping) -> CheckpointRow:
    """Return a row of ``checkpoints``."""
    return CheckpointRow(row["stage"], row["step"], row["path"], json.loads(row["state_json"]))


def evaluation_row(row: RowMapping) -> EvaluationRow:
    """Return a row of ``evaluations``."""
    return EvaluationRow(
        row["label"], row["domain"], row["task_id"], row["trace_id"], row["blob"], row["passed"], row["valid"]
    )


def event_row(row: RowMapping) -> EventRow:
    """Return a row of ``events``."""
    return EventRow(row["kind"], row["at"], row["incarnation"], json.loads(row["fields_json"]))
