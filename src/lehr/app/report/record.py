"""Reads what a run left behind. Works on runs that are still going on, and on dead ones."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lehr.app.report.curves import Line, read_metrics
from lehr.app.report.summary import Attempt
from lehr.core.errors import ConfigError
from lehr.core.reward import Valid
from lehr.ledger.blobs import BlobStore
from lehr.ledger.reader import LedgerReader
from lehr.ledger.rows import EvaluationRow, EventRow, StageRow
from lehr.pipeline.folder import RunFolder
from lehr.pipeline.recipe import Recipe
from lehr.pipeline.records import ALARM, ENDED_EARLY
from lehr.rollout.base import Judged
from lehr.wire.codec import decode


@dataclass(frozen=True, slots=True)
class Record:
    """A run as it is on disk. ``groups`` counts the final states of all groups of all RL stages.

    notes: what a reader of the numbers must know, such as that a stage ended before its last step.
    """

    folder: RunFolder
    recipe: Recipe
    started: float
    stages: tuple[StageRow, ...]
    attempts: tuple[Attempt, ...]
    lines: tuple[Line, ...]
    groups: Mapping[str, int]
    notes: tuple[str, ...] = ()

    @property
    def labels(self) -> list[str]:
        """Names of the measurements, in their order: ``base``, then one per stage."""
        return ["base", *(stage.name for stage in self.recipe.stages)]

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """(after, before): each RL stage against the base and every stage of plain SFT."""
        before = ["base", *(s.name for s in self.recipe.stages if s.type in {"sft", "control"})]
        return [(s.name, b) for s in self.recipe.stages if s.type == "rl" for b in before]

    @property
    def last(self) -> str:
        """The last measured stage that is no control."""
        controls = {stage.name for stage in self.recipe.stages if stage.type == "control"}
        seen = {attempt.stage for attempt in self.attempts} - controls
        return next((label for label in reversed(self.labels) if label in seen), "base")

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds spent in each stage and measurement, over all starts of the run."""
        return {stage.name: stage.seconds for stage in self.stages}


def read_record(path: Path) -> Record:
    """Read a run folder; verdicts come from the stored traces themselves.

    Raises ``ConfigError`` for a folder without a run, or whose ledger and traces disagree.
    """
    folder, recipe = RunFolder.open(path)
    folder.require_ledger()
    if not folder.ledger.exists():
        raise ConfigError(f"{path} holds no record yet", hint="Wait until the run has started.")
    started = float(json.loads(folder.config.read_text()).get("started", time.time()))
    blobs = BlobStore(folder.blobs)
    reader = LedgerReader(folder.ledger)
    try:
        rows = reader.evaluations()
        stages = reader.stages()
        groups: Counter[str] = Counter()
        for stage in recipe.stages:
            if stage.type == "rl":
                groups += reader.group_states(stage.name)
        events = reader.events(ENDED_EARLY)
        alarms = alarm_notes(reader.events(ALARM))
        ended = {str(event.fields.get("stage")): str(event.fields.get("text")) for event in events}
    finally:
        reader.close()
    labels = {"base", *(stage.name for stage in recipe.stages)}
    attempts = tuple(_attempt(row, blobs) for row in rows if row.label in labels)
    lines = tuple(read_metrics(folder.metrics))
    return Record(
        folder, recipe, started, stages, attempts, lines, dict(groups.most_common()), (*ended.values(), *alarms)
    )


def alarm_notes(events: Sequence[EventRow]) -> tuple[str, ...]:
    """Return one sentence per stage and kind of alarm: how often it rang, when first, and why then."""
    rung: dict[tuple[str, str], list[EventRow]] = {}
    for event in events:
        rung.setdefault((str(event.fields.get("stage")), str(event.fields.get("name"))), []).append(event)
    notes: list[str] = []
    for (stage, _), found in rung.items():
        first, times = found[0].fields, len(found)
        often = "" if times == 1 else f", the first of {times} such alarms"
        notes.append(f"{stage}, step {first.get('step')}{often}: {first.get('text')}")
    return tuple(notes)


def _attempt(row: EvaluationRow, blobs: BlobStore) -> Attempt:
    judged = decode(blobs.get(row.blob), Judged)
    reward = judged.reward
    valid = isinstance(reward, Valid)
    passed = isinstance(reward, Valid) and reward.passed
    if (passed, valid) != (row.passed, row.valid):
        raise ConfigError(
            f"the ledger says passed={row.passed}, valid={row.valid} of trace {row.trace_id}; the trace itself "
            f"says passed={passed}, valid={valid}",
            hint="The run folder was changed by hand; its numbers cannot be trusted.",
        )
    return Attempt(row.label, row.domain, row.task_id, passed, valid, judged)
