"""Watches over the steps of a stage: says and records alarms, and tells when the run has diverged."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from lehr.core.errors import Diverged
from lehr.pipeline.records import ALARM
from lehr.train.alarms import Alarm, Watch
from lehr.train.base import AlarmConfig


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


class Guard:
    """Sees every step of a stage. What it remembers is in :meth:`state`, which belongs into checkpoints."""

    def __init__(self, ledger: Events, observer: Notes, stage: str, config: AlarmConfig) -> None:
        self._ledger = ledger
        self._observer = observer
        self._stage = stage
        self._config = config
        self._watch = Watch(config)

    @property
    def suspicious(self) -> bool:
        """Whether weights of now are no place to go back to."""
        return self._watch.suspicious

    async def watch(self, step: int, work: Awaitable[dict[str, float]]) -> tuple[dict[str, float], str]:
        """Let ``work`` take a step. Returns its metrics (none if a value was not finite), and a sentence that
        says why the run has diverged, or nothing.
        """
        try:
            metrics = await work
        except (Diverged, ExceptionGroup) as error:
            return {}, self.not_finite(step, _diverged(error))
        diverged = ""
        for alarm in self._watch.observe(metrics):
            self._tell(step, alarm)
            if alarm.fatal and (self._config.stop or alarm.name == "not_finite"):
                diverged = diverged or alarm.text
        return metrics, diverged

    def not_finite(self, step: int, error: Diverged) -> str:
        """Tell of a step that left or met a value that is not finite; return the sentence that says so."""
        text = error.what.removeprefix(f"step {step}: ")
        self._tell(step, Alarm("not_finite", "loss", math.nan, math.inf, text, True))
        return error.what

    def _tell(self, step: int, alarm: Alarm) -> None:
        self._observer.note(f"step {step}: {alarm.text}")
        numbers = {"value": alarm.value, "threshold": alarm.threshold}
        self._ledger.event(
            ALARM,
            stage=self._stage,
            step=step,
            name=alarm.name,
            metric=alarm.metric,
            text=alarm.text,
            fatal=alarm.fatal,
            **{key: value for key, value in numbers.items() if math.isfinite(value)},
        )

    def state(self) -> dict[str, Any]:
        """Return JSON-serialisable state."""
        return {"watch": self._watch.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over :meth:`state`."""
        self._watch = Watch.restore(self._config, state.get("watch", {}))


def _diverged(error: Diverged | ExceptionGroup[Exception]) -> Diverged:
    """Return the error itself, or the first of a group of nothing else; raise a group of other errors."""
    if isinstance(error, Diverged):
        return error
    _, others = error.split(Diverged)
    if others is not None:
        raise error
    found: BaseException = error
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    assert isinstance(found, Diverged)
    return found
