"""What reinforcement learning does with a batch: credit it, train on it, look at the numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from lehr.core.batch import Batch, Sample, StepResult
from lehr.core.errors import Diverged
from lehr.pipeline.recipe import RlStage
from lehr.pipeline.records import ALARM
from lehr.pipeline.samples import Crediting, DomainScales, cut, to_samples
from lehr.rollout.base import Group
from lehr.train.alarms import Alarm, Watch
from lehr.train.base import ScoredBy, Trainer


class Events(Protocol):
    """Where alarms are recorded; ``ledger.store.Ledger`` is one."""

    def event(self, kind: str, /, **fields: Any) -> object:
        """Record an event."""
        ...


class Notes(Protocol):
    """Who hears of alarms; ``pipeline.observer.Observer`` is one."""

    def note(self, text: str) -> object:
        """Say a line."""
        ...


class Learner:
    """Life cycle: :meth:`begin`, any number of :meth:`apply`, :meth:`end`. What it remembers between batches is
    in :meth:`state`, which belongs into checkpoints.
    """

    def __init__(self, trainer: Trainer, ledger: Events, observer: Notes, stage: RlStage) -> None:
        self.stage = stage
        self.rule = Crediting(stage.credit, stage.negative_weight, stage.advantage, stage.reward_kl)
        self._trainer = trainer
        self._ledger = ledger
        self._observer = observer
        self._scales = DomainScales({})
        self._watch = Watch(stage.alarms)

    @property
    def suspicious(self) -> bool:
        """Whether weights of now are no place to go back to."""
        return self._watch.suspicious

    async def begin(self, start: Path) -> None:
        """Let the trainer keep the weights that the stage starts from as the reference, where one is needed."""
        if self.stage.needs_reference:
            held = await self._trainer.keep_reference(start)
            self._observer.note(f"{self.stage.name}: the reference model takes {held / 2**20:.1f} MiB")

    async def end(self) -> None:
        """Let the reference go."""
        if self.stage.needs_reference:
            await self._trainer.keep_reference(None)

    async def apply(self, step: int, groups: Sequence[Group]) -> tuple[dict[str, float], str]:
        """Train on a batch, in as many passes as the stage says. Returns the metrics of the first pass (none if
        it could not be taken), and a sentence that says why the run has diverged, or nothing.
        """
        stage = self.stage
        samples = cut(groups)
        if stage.needs_reference:
            samples = await self._scored(samples, "reference", "reference")
        samples = to_samples(groups, self._scales, self.rule, samples)
        first: StepResult | None = None
        try:
            if stage.passes > 1 and stage.train.policy_loss == "decoupled_ppo":
                samples = await self._scored(samples, "policy", "proximal")
            for _ in range(stage.passes):
                result = await self._trainer.step(Batch(step, "policy_gradient", samples))
                first = first or result
        except Diverged as error:
            self._tell(step, Alarm("not_finite", "loss", math.nan, math.inf, error.what, True))
            return dict(first.metrics) if first else {}, error.what
        metrics = dict(first.metrics) if first else {}
        diverged = ""
        for alarm in self._watch.observe(metrics):
            self._tell(step, alarm)
            if alarm.fatal and (stage.alarms.stop or alarm.name == "not_finite"):
                diverged = diverged or alarm.text
        return metrics, diverged

    async def _scored(self, samples: Sequence[Sample], by: ScoredBy, field: str) -> tuple[Sample, ...]:
        found = await self._trainer.score(samples, by) if samples else []
        return tuple(replace(s, **{field: values}) for s, values in zip(samples, found, strict=True))

    def _tell(self, step: int, alarm: Alarm) -> None:
        self._observer.note(f"step {step}: {alarm.text}")
        numbers = {"value": alarm.value, "threshold": alarm.threshold}
        self._ledger.event(
            ALARM,
            stage=self.stage.name,
            step=step,
            name=alarm.name,
            metric=alarm.metric,
            text=alarm.text,
            fatal=alarm.fatal,
            **{key: value for key, value in numbers.items() if math.isfinite(value)},
        )

    def state(self) -> dict[str, Any]:
        """Return JSON-serialisable state."""
        return {"scales": self._scales.state(), "watch": self._watch.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over :meth:`state`."""
        self._scales = DomainScales.restore(state.get("scales", {}))
        self._watch = Watch.restore(self.stage.alarms, state.get("watch", {}))
