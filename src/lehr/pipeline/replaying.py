"""Replay in a run: what is drawn, recorded, and made into samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from lehr.core.batch import Sample
from lehr.core.errors import ConfigError
from lehr.ledger.rows import ReplayRow
from lehr.pipeline.context import Context
from lehr.pipeline.samples import Crediting, DomainScales, group_credit
from lehr.rollout.base import Group, Judged
from lehr.rollout.replay import ReplayConfig, ReplayStore
from lehr.wire.codec import decode


class Replaying:
    """The replay of one stage. Every method does nothing where the stage has none."""

    def __init__(self, ctx: Context, stage: str, config: ReplayConfig | None, rule: Crediting) -> None:
        self._ctx = ctx
        self._stage = stage
        self._store = None if config is None else ReplayStore(config, partial(_advantages, rule))

    def state(self) -> list[dict[str, Any]]:
        """Return what a checkpoint has to hold."""
        return self._store.state() if self._store is not None else []

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Take over what a checkpoint held."""
        if self._store is not None:
            self._store.restore(state)

    def draw(self, step: int, rates: Mapping[str, float], scales: DomainScales) -> list[ReplayRow]:
        """Return what ``step`` replays, for the record, each with the advantage that it is trained with: the
        one that it had in its group, on the domain's scale of now, times the weight for how likely it was
        drawn.
        """
        if self._store is None:
            return []
        seed = f"{self._ctx.recipe.seed}/{self._stage}/{step}"
        rows: list[ReplayRow] = []
        for drawn in self._store.draw(step, rates, seed):
            entry = drawn.entry
            scale = scales.scales[entry.domain].value if entry.domain in scales.scales else 1.0
            rows.append(ReplayRow(entry.trace_id, entry.group_id, entry.advantage / scale * drawn.weight))
        return rows

    def learn(self, step: int, groups: Sequence[Group], rows: Sequence[ReplayRow]) -> None:
        """Take in what ``step`` trained and replayed."""
        if self._store is not None:
            self._store.used([row.trace_id for row in rows])
            for group in groups:
                self._store.offer(group, step)

    def samples(self, rows: Sequence[ReplayRow]) -> tuple[Sample, ...]:
        """Return the samples of replayed traces, from the record, with the log-probabilities that were recorded
        when they were sampled: the policy loss corrects for the weights' having moved on.
        """
        found: list[Sample] = []
        for row in rows:
            judged = self._judged(row)
            for segment in judged.trace.segments:
                if not segment.own.any():
                    continue
                found.append(
                    Sample(
                        tokens=segment.tokens,
                        own=segment.own,
                        logprobs=segment.raw_logprobs,
                        advantages=np.where(segment.own, np.float32(row.advantage), np.float32(0)),
                        temperature=segment.sampling.temperature,
                        prefix=f"replay/{row.trace_id}",
                        trace_id=row.trace_id,
                        domain="",
                    )
                )
        return tuple(found)

    def _judged(self, row: ReplayRow) -> Judged:
        for blob in self._ctx.ledger.trace_blobs(row.group_id):
            judged = decode(self._ctx.blobs.get(blob), Judged)
            if judged.trace.id == row.trace_id:
                return judged
        raise ConfigError(
            f"trace {row.trace_id} of group {row.group_id} is not in the record any more",
            hint="The run folder was changed by hand; put it back from a copy.",
        )


def _advantages(rule: Crediting, group: Group) -> list[float]:
    return [float(member[0]) for member in group_credit(group, rule)]
