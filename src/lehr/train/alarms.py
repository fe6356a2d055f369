"""Alarms over the metrics of training steps, and which of them say that a run has diverged.

Plain numbers in and out. To add one: a threshold in ``AlarmConfig``, and a line in :meth:`Watch.observe`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from lehr.train.base import AlarmConfig

AlarmName = Literal[
    "not_finite",
    "loss_spike",
    "entropy_collapse",
    "grad_norm",
    "mismatch",
    "effective_samples",
    "clipped",
    "masked",
    "reference_kl",
]
HISTORY = ("loss", "grad_norm", "entropy")
MIN_HISTORY = 3
"""Steps before what is unusual can be told."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """A metric beyond its threshold. ``fatal``: the run has diverged, and more steps make it worse."""

    name: AlarmName
    metric: str
    value: float
    threshold: float
    text: str
    fatal: bool = False


class Watch:
    """Sees the metrics of each step in turn; remembers what is usual. Its state belongs into checkpoints."""

    def __init__(self, config: AlarmConfig) -> None:
        self.config = config
        self._seen: dict[str, list[float]] = {name: [] for name in HISTORY}
        self._first_entropy: float | None = None
        self._collapsed_steps = 0

    @property
    def suspicious(self) -> bool:
        """Whether entropy has begun to collapse: weights of now are no place to go back to."""
        return self._collapsed_steps > 0

    def observe(self, metrics: Mapping[str, float]) -> list[Alarm]:
        """Take in the metrics of a step (names without the stage) and return its alarms, fatal ones first."""
        if self._first_entropy is None and "entropy" in metrics:
            self._first_entropy = metrics["entropy"]
        found = sorted(self._alarms(metrics), key=lambda alarm: not alarm.fatal)
        for name, seen in self._seen.items():
            if name in metrics and math.isfinite(metrics[name]):
                seen.append(metrics[name])
                del seen[: -self.config.window]
        return found

    def _alarms(self, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        config = self.config
        for name in HISTORY:
            value = metrics.get(name, 0.0)
            if not math.isfinite(value):
                yield Alarm("not_finite", name, value, math.inf, f"{name} is {value}", True)
                return
        size, usual = abs(metrics.get("loss", 0.0)), self._usual("loss")
        limit = max(config.loss_floor, config.loss_spike * usual)
        if len(self._seen["loss"]) >= MIN_HISTORY and size > limit:
            yield Alarm(
                "loss_spike", "loss", size, limit, f"the loss rose to {size:.3g}, {usual:.3g} being usual", True
            )
        yield from self._entropy(metrics)
        norm, usual = metrics.get("grad_norm", 0.0), self._usual("grad_norm")
        limit = config.grad_norm * usual
        if len(self._seen["grad_norm"]) >= MIN_HISTORY and norm > limit > 0:
            text = f"the gradient norm rose to {norm:.3g}, {usual:.3g} being usual"
            yield Alarm("grad_norm", "grad_norm", norm, limit, text)
        yield from self._above(
            "mismatch", metrics, ["mismatch_kl"], config.mismatch_kl, "trainer and sampler disagree"
        )
        ess = metrics.get("ess", 1.0)
        if ess < config.effective_samples:
            text = f"importance weights leave an effective {ess:.0%} of the tokens"
            yield Alarm("effective_samples", "ess", ess, config.effective_samples, text)
        pairs: Sequence[tuple[AlarmName, float, str]] = (
            ("clipped", config.clipped, "the bound of the loss acts on many tokens"),
            ("masked", config.masked, "many tokens are in masked sequences"),
        )
        for name, threshold, text in pairs:
            yield from self._above(name, metrics, [f"{name}_up", f"{name}_down"], threshold, text)
        if config.reference_kl is not None:
            text = "the policy is far from the reference"
            yield from self._above("reference_kl", metrics, ["reference_kl"], config.reference_kl, text)

    def _entropy(self, metrics: Mapping[str, float]) -> Iterator[Alarm]:
        config, first = self.config, self._first_entropy
        if "entropy" not in metrics or first is None:
            return
        value = metrics["entropy"]
        limit = min(config.entropy_floor, config.entropy_fraction * first)
        self._collapsed_steps = self._collapsed_steps + 1 if value < limit else 0
        if self._collapsed_steps:
            text = f"entropy fell to {value:.2g} nats from {first:.2g}"
            fatal = self._collapsed_steps >= config.entropy_steps
            yield Alarm("entropy_collapse", "entropy", value, limit, text, fatal)

    @staticmethod
    def _above(
        name: AlarmName, metrics: Mapping[str, float], keys: Sequence[str], threshold: float, text: str
    ) -> Iterator[Alarm]:
        for key in keys:
            value = metrics.get(key, 0.0)
            if value > threshold:
                yield Alarm(name, key, value, threshold, f"{text} ({key} {value:.3g} > {threshold:g})")

    def _usual(self, name: str) -> float:
        return median(abs(value) for value in self._seen[name]) if self._seen[name] else 0.0

    def state(self) -> dict[str, object]:
        """Return JSON-serialisable state."""
        return {
            "seen": {name: list(values) for name, values in self._seen.items()},
            "first_entropy": self._first_entropy,
            "collapsed_steps": self._collapsed_steps,
        }

    @classmethod
    def restore(cls, config: AlarmConfig, state: Mapping[str, object]) -> Watch:
        """Rebuild from :meth:`state`; empty state is that of a new one."""
        watch = cls(config)
        match state:
            case {"seen": dict() as seen, "first_entropy": first, "collapsed_steps": int() as steps}:
                watch._seen = {name: [float(v) for v in seen.get(name, [])] for name in HISTORY}
                watch._first_entropy = None if first is None else float(str(first))
                watch._collapsed_steps = steps
            case _:
                pass
        return watch
