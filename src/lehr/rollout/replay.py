"""Replay: successes that are rare enough to be worth a second step, kept for a while and drawn by what they are
worth.

What is in the store follows from the batches that were trained and from what was drawn for them, both of which
are in the record: a run that was killed builds it again from its last checkpoint on. Pure logic; the traces
themselves stay where they are stored.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import Field

from lehr.core.config import Config, Count
from lehr.core.reward import Valid
from lehr.rollout.base import Group


class ReplayConfig(Config):
    """What is replayed, how often, for how long."""

    per_step: Count = 4
    """Traces replayed in a step, beside its groups."""
    per_domain: Count = 64
    """Traces kept of one domain; the least valuable leaves first."""
    max_uses: Count = 2
    """Times that one trace is replayed."""
    max_age: Count = 8
    """Versions after the step that first trained it until which a trace may be replayed."""
    rare_below: float = Field(default=0.3, gt=0, le=1)
    """Only traces of domains of whose recent attempts fewer than this share pass are replayed."""
    priority: float = Field(default=1.0, ge=0)
    """Exponent of a trace's worth in the probability that it is drawn; 0 draws evenly."""
    correction: float = Field(default=1.0, ge=0, le=1)
    """Exponent of the weight that undoes the uneven drawing: 1 is unbiased, 0 is none."""


@dataclass(slots=True)
class Entry:
    """A success that may be replayed. advantage: its credit less its group's mean. step: that trained it
    first.
    """

    trace_id: str
    group_id: str
    domain: str
    task_id: str
    advantage: float
    step: int
    uses: int = 0


@dataclass(frozen=True, slots=True)
class Drawn:
    """An entry that a step replays. weight: what its gradient is multiplied by for how likely it was drawn."""

    entry: Entry
    weight: float


class ReplayStore:
    """Bounded: ``per_domain`` entries of each domain, none older than ``max_age`` or used more than
    ``max_uses``. advantages: returns one for each valid member of a group, its credit less the baseline.
    """

    def __init__(self, config: ReplayConfig, advantages: Callable[[Group], Sequence[float]]) -> None:
        self._config = config
        self._advantages = advantages
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, trace_id: str) -> bool:
        return trace_id in self._entries

    def state(self) -> list[dict[str, Any]]:
        """Return JSON-serialisable state."""
        return [asdict(entry) for entry in self._entries.values()]

    def restore(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Take over a saved state."""
        self._entries = {str(fields["trace_id"]): Entry(**fields) for fields in state}

    def offer(self, group: Group, step: int) -> None:
        """Take in the successes of a group that ``step`` trained, as far as they did better than their
        group.
        """
        for member, advantage in zip(group.valid, self._advantages(group), strict=True):
            reward = member.reward
            if not isinstance(reward, Valid) or not reward.passed or advantage <= 0:
                continue
            entry = Entry(
                member.trace.id,
                group.id,
                group.domain,
                group.task_id,
                advantage,
                step,
            )
            self._entries[entry.trace_id] = entry
        mine = [e for e in self._entries.values() if e.domain == group.domain]
        mine.sort(key=lambda e: (e.advantage, e.step, e.trace_id))
        for entry in mine[: max(0, len(mine) - self._config.per_domain)]:
            del self._entries[entry.trace_id]

    def draw(self, step: int, rates: Mapping[str, float], seed: str) -> list[Drawn]:
        """Return up to ``per_step`` different entries for ``step``; nothing is counted until :meth:`used`.

        rates: of recent attempts that pass, by domain. Inclusion probabilities are exactly proportional to
        ``(advantage * (1 - rate)) ** priority``, as far as none exceeds 1 (systematic sampling; Madow 1949),
        and the weight is ``(k / N / probability) ** correction``: on average what k of the N entries drawn
        evenly would give (Horvitz and Thompson 1952; prioritised replay, Schaul et al. 2016, arXiv 1511.05952,
        in replacement's stead).
        """
        self._expire(step)
        rare = [e for e in self._entries.values() if rates.get(e.domain, 1.0) < self._config.rare_below]
        rare.sort(key=lambda e: e.trace_id)
        worth = [(e.advantage * (1.0 - rates[e.domain])) ** self._config.priority for e in rare]
        count = min(self._config.per_step, len(rare))
        chances = inclusion(worth, count)
        chosen = systematic(chances, random.Random(seed))
        return [
            Drawn(rare[i], (count / len(rare) / chances[i]) ** self._config.correction) for i in sorted(chosen)
        ]

    def used(self, trace_ids: Sequence[str]) -> None:
        """Count a use of each trace; one that reached its cap leaves."""
        for trace_id in trace_ids:
            entry = self._entries.get(trace_id)
            if entry is not None:
                entry.uses += 1
                if entry.uses >= self._config.max_uses:
                    del self._entries[trace_id]

    def _expire(self, step: int) -> None:
        old = [e.trace_id for e in self._entries.values() if step - e.step > self._config.max_age]
        for trace_id in old:
            del self._entries[trace_id]


def inclusion(worth: Sequence[float], count: int) -> list[float]:
    """Return probabilities of being among ``count``, proportional to ``worth`` up to 1; they sum to
    ``count``.
    """
    certain: set[int] = set()
    while True:
        open_ = [i for i in range(len(worth)) if i not in certain]
        left, total = count - len(certain), sum(worth[i] for i in open_)
        full = {i for i in open_ if left * worth[i] >= total} if total > 0 else set[int]()
        if not full:
            break
        certain |= full
    return [1.0 if i in certain else left * w / total if total > 0 else 0.0 for i, w in enumerate(worth)]


def systematic(chances: Sequence[float], source: random.Random) -> list[int]:
    """Return indices, each with its probability and none twice: a comb with a random start over a shuffled
    line.
    """
    order = list(range(len(chances)))
    source.shuffle(order)
    start, at, found = source.random(), 0.0, list[int]()
    for index in order:
        at += chances[index]
        if at > start + len(found):
            found.append(index)
    return found
