"""What the scheduler is told and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from lehr.core.task import Split


@dataclass(frozen=True, slots=True)
class Draw:
    """A task to run next."""

    domain: str
    split: Split
    index: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a drawn group. ``rewards`` holds valid rewards only; ``invalid`` counts the others.

    seconds: compute spent, engine and sandbox together.
    """

    domain: str
    passed: int
    valid: int
    invalid: int
    seconds: float = 0.0


class Scheduler(Protocol):
    """Decides what to run."""

    def draw(self) -> Draw:
        """Return the next task. No task of a split is drawn twice before all were drawn once."""
        ...

    def record(self, outcome: Outcome) -> None:
        """Learn from a finished group. Infrastructure failures never change a pass rate."""
        ...

    def weights(self) -> Mapping[str, float]:
        """Return the current share of each domain; sums to 1."""
        ...

    def why(self, domain: str) -> str:
        """Say in one sentence why the domain has the share that it has."""
        ...

    def state(self) -> dict[str, Any]:
        """Return JSON-serialisable state; a scheduler restored from it draws the same tasks."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over a saved state."""
        ...
