"""The verifier protocol and the composition of terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from lehr.core.episode import Evidence
from lehr.core.registry import Registry
from lehr.core.reward import InvalidReason
from lehr.core.task import Gold, Task
from lehr.sandbox.base import Boxes


@dataclass(frozen=True, slots=True)
class Score:
    """One term's judgement in [0, 1]. ``detail`` says why, for a person."""

    value: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class NoScore:
    """The term could not be judged through no fault of the candidate."""

    reason: InvalidReason
    detail: str = ""


class Verifier(Protocol):
    """Judges one term. Stateless: the same evidence and gold give the same score."""

    async def __call__(self, task: Task, evidence: Evidence, gold: Gold, boxes: Boxes) -> Score | NoScore:
        """Return the score. The candidate's own faults (crash, hang, wrong answer, malformed or missing
        output) score low; only faults of our own machinery return :class:`NoScore`.
        """
        ...


VERIFIERS: Registry[Verifier] = Registry("verifier")
