"""Draws tasks: which domain by weight and deficit, which task by a permutation of its split.

Every draw credits each domain with its share and charges one to the domain that has the most credit. What
a domain is owed is carried over from draw to draw, so that over any stretch of draws, however the weights
move, it gets less than one draw more and less than (domains - 1) fewer than its shares add up to.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from lehr.core.errors import ConfigError, UnknownName
from lehr.core.task import Split
from lehr.schedule.base import Draw, Outcome
from lehr.schedule.weights import PassRate, SchedulerConfig, multiplier, with_floor

__all__ = ["PassRateScheduler", "SchedulerConfig"]


class PassRateScheduler:
    """The scheduler of a stage; see ``schedule.base.Scheduler``. Deterministic in its seed and outcomes."""

    def __init__(
        self, config: SchedulerConfig, domains: Mapping[str, int], split: Split = "train", seed: int = 0
    ) -> None:
        self._config = config
        self._sizes = {name: size for name, size in domains.items() if size > 0}
        if not self._sizes:
            raise ConfigError(f"no domain has a task in split {split!r}")
        for name in config.targets:
            if name not in self._sizes:
                raise UnknownName.among("domain with a target", name, self._sizes)
        self._split: Split = split
        self._seed = seed
        self._rates = {name: PassRate() for name in self._sizes}
        self._credit = dict.fromkeys(self._sizes, 0.0)
        self._drawn = dict.fromkeys(self._sizes, 0)
        self._orders: dict[str, tuple[int, list[int]]] = {}

    def draw(self) -> Draw:
        """Return the next task. No task of a split is drawn twice before all were drawn once."""
        for name, share in self.weights().items():
            self._credit[name] += share
        domain = max(self._credit, key=self._credit.__getitem__)
        self._credit[domain] -= 1.0
        epoch, position = divmod(self._drawn[domain], self._sizes[domain])
        self._drawn[domain] += 1
        return Draw(domain, self._split, self._order(domain, epoch)[position])

    def record(self, outcome: Outcome) -> None:
        """Learn from a finished group. Attempts that could not be judged are counted, and change nothing."""
        if outcome.domain not in self._rates:
            raise UnknownName.among("domain", outcome.domain, self._rates)
        self._rates[outcome.domain].add(outcome.passed, outcome.valid, outcome.invalid, self._config.half_life)

    def weights(self) -> Mapping[str, float]:
        """Return the current share of each domain; sums to 1."""
        raw = {n: multiplier(self._rate(n), self._target(n), self._config.strength) for n in self._sizes}
        return with_floor(raw, self._config.floor)

    def rates(self) -> Mapping[str, float]:
        """Return the recent pass rate of each domain; one without attempts counts as at its target."""
        return {name: self._rate(name) for name in self._sizes}

    def why(self, domain: str) -> str:
        """Say in one sentence why the domain has the share that it has."""
        if domain not in self._rates:
            raise UnknownName.among("domain", domain, self._rates)
        counts, target, share = self._rates[domain], self._target(domain), self.weights()[domain]
        invalid = (
            f"; {counts.invalid} attempts could not be judged and change nothing" if counts.invalid else ""
        )
        if not counts.attempts:
            unknown = "no attempt has been judged yet, so it counts as at its target"
            return f"{domain} has {share:.0%}: {unknown}{invalid}"
        rate = self._rate(domain)
        factor = multiplier(rate, target, self._config.strength)
        side = "at" if abs(rate - target) < 0.005 else "below" if rate < target else "above"
        effect = {
            "at": "leaves it as it is",
            "below": f"raises it {factor:.2f}x",
            "above": f"lowers it {factor:.2f}x",
        }
        floored = share <= self._config.floor / len(self._sizes) + 1e-12
        held = "; the floor holds it there" if floored else ""
        return (
            f"{domain} has {share:.0%}: about {rate:.0%} of its recent attempts pass, {side} the target of "
            f"{target:.0%}, which {effect[side]}{held}{invalid}"
        )

    def state(self) -> dict[str, Any]:
        """Return JSON-serialisable state; a scheduler restored from it draws the same tasks."""
        return {
            "seed": self._seed,
            "split": self._split,
            "sizes": dict(self._sizes),
            "drawn": dict(self._drawn),
            "credit": dict(self._credit),
            "rates": {name: asdict(rate) for name, rate in self._rates.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state. Refuses one of another seed, split or sizes: it would repeat tasks."""
        mine = self.state()
        for key in ("seed", "split", "sizes"):
            if state.get(key) != mine[key]:
                raise ConfigError(
                    f"the saved scheduler had {key} {state.get(key)!r}, this one has {mine[key]!r}",
                    hint="Resume with the domains that the run was started with.",
                )
        self._drawn = {name: int(state["drawn"][name]) for name in self._sizes}
        self._credit = {name: float(state["credit"][name]) for name in self._sizes}
        self._rates = {name: PassRate(**state["rates"][name]) for name in self._sizes}

    def _target(self, domain: str) -> float:
        return self._config.targets.get(domain, self._config.target)

    def _rate(self, domain: str) -> float:
        return self._rates[domain].rate(self._target(domain), self._config.prior_attempts)

    def _order(self, domain: str, epoch: int) -> list[int]:
        known = self._orders.get(domain)
        if known is None or known[0] != epoch:
            order = list(range(self._sizes[domain]))
            random.Random(f"{self._seed}/{domain}/{self._split}/{epoch}").shuffle(order)
            known = self._orders[domain] = (epoch, order)
        return known[1]
