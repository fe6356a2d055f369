"""What a rollout produces for the trainer's side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lehr.core.reward import Reward, Valid
from lehr.core.trace import Trace

GroupState = Literal["drawn", "running", "judged", "complete", "trained", "dropped"]
DropReason = Literal["no_variance", "no_survivors", "stale", "cancelled", "stage_over", "resumed"]


@dataclass(frozen=True, slots=True)
class Judged:
    """A trace with its reward."""

    trace: Trace
    reward: Reward


@dataclass(frozen=True, slots=True)
class Group:
    """Attempts at one task, drawn together; the unit of exactly-once. Members are matched by id: a lost
    member shifts nobody else.
    """

    id: str
    domain: str
    task_id: str
    members: tuple[Judged, ...]

    @property
    def valid(self) -> tuple[Judged, ...]:
        """Members whose reward is valid and whose trace did not fail."""
        return tuple(m for m in self.members if isinstance(m.reward, Valid) and m.trace.failure is None)
