"""Which of several judged answers are worth imitating: the good ones, the best first, each idea once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lehr.core.batch import Sample

SHINGLE = 5
"""Tokens that are compared together when likeness is measured."""

Keep = Literal["passing", "best"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What is kept; the fields of :class:`~lehr.pipeline.recipe.RejectStage` of the same names."""

    keep: Keep = "passing"
    keep_per_task: int = 1
    min_value: float | None = None
    near_duplicate: float = 1.0


@dataclass(frozen=True, slots=True)
class Answered:
    """A judged answer to a task. said: its own tokens, by which answers are compared. samples: to train on."""

    task: str
    value: float
    passed: bool
    said: tuple[int, ...]
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was kept, in the order of the tasks, and how many were not, by reason."""

    samples: tuple[Sample, ...]
    answers: int
    failed: int = 0
    alike: int = 0
    crowded: int = 0

    def why(self) -> str:
        """Say where the others went."""
        return (
            f"{self.failed} not good enough, {self.alike} too much like another of their task, "
            f"{self.crowded} beyond what is kept of one task"
        )


def choose(answers: Sequence[Answered], rule: Rule) -> Chosen:
    """Keep at most ``keep_per_task`` answers of each task, those of the highest reward first, the earlier of
    two equal ones first.

    ``passing`` takes those that solved the task, ``best`` whatever did better than another attempt at it (best
    of N, also where none solved it); of both, those of at least ``min_value``. Of two answers whose likeness
    reaches ``near_duplicate`` (see :func:`likeness`; 1 is the same text) the later is left out.
    """
    tasks: dict[str, list[Answered]] = {}
    for answer in answers:
        tasks.setdefault(answer.task, []).append(answer)
    samples: list[Sample] = []
    kept_count = failed = alike = crowded = 0
    for attempts in tasks.values():
        good = [a for a in attempts if _good(a, attempts, rule)]
        failed += len(attempts) - len(good)
        kept: list[Answered] = []
        for answer in sorted(good, key=lambda a: -a.value):
            if any(likeness(answer.said, other.said) >= rule.near_duplicate for other in kept):
                alike += 1
            elif len(kept) == rule.keep_per_task:
                crowded += 1
            else:
                kept.append(answer)
        kept_count += len(kept)
        samples += [sample for answer in kept for sample in answer.samples]
    return Chosen(tuple(samples), kept_count, failed, alike, crowded)


def _good(answer: Answered, attempts: Sequence[Answered], rule: Rule) -> bool:
    if rule.min_value is not None and answer.value < rule.min_value:
        return False
    if answer.passed:
        return True
    if rule.keep == "passing":
        return False
    best, worst = max(a.value for a in attempts), min(a.value for a in attempts)
    return answer.value == best > worst


def likeness(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the Jaccard index of the runs of :data:`SHINGLE` tokens of two texts; 1 for equal texts only."""
    if tuple(one) == tuple(other):
        return 1.0
    first, second = _shingles(one), _shingles(other)
    return min(len(first & second) / len(first | second), 1.0 - 1e-9)


def _shingles(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    return {tuple(tokens[i : i + SHINGLE]) for i in range(max(1, len(tokens) - SHINGLE + 1))}
