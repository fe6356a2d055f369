"""What was said in an attempt, as it really went: the prompt, the model's own tokens, what came back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from lehr.app.report.summary import Attempt
from lehr.core.trace import Segment, Trace
from lehr.model.base import Renderer

Speaker = Literal["prompt", "model", "environment"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of one speaker."""

    speaker: Speaker
    text: str


def pieces_of(trace: Trace, renderer: Renderer) -> list[Piece]:
    """Return the segments of a trace as text, split where the speaker changes."""
    return [piece for segment in trace.segments for piece in _pieces(segment, renderer)]


def _pieces(segment: Segment, renderer: Renderer) -> list[Piece]:
    pieces: list[Piece] = []
    spoken = False
    for own, run in groupby(
        zip(segment.own.tolist(), segment.tokens.tolist(), strict=True), key=lambda p: p[0]
    ):
        spoken = spoken or own
        speaker: Speaker = "model" if own else "environment" if spoken else "prompt"
        pieces.append(Piece(speaker, renderer.text([token for _, token in run])))
    return pieces


@dataclass(frozen=True, slots=True)
class Sample:
    """One task before and after training. ``before`` is None where the base model was not measured on it."""

    domain: str
    good: bool
    before: Attempt | None
    after: Attempt


def choose_samples(
    attempts: Sequence[Attempt], *, domains: Sequence[str], first: str, last: str, each: int = 2
) -> list[Sample]:
    """Return, per domain, up to ``each`` tasks that training solved and ``each`` that still fail.

    Tasks that only training solved come before those that were solved all along.
    """
    by_key = {(a.stage, a.task_id): a for a in attempts}
    samples: list[Sample] = []
    for domain in domains:
        mine = sorted((a for a in attempts if a.stage == last and a.domain == domain), key=lambda a: a.task_id)
        pairs = [(by_key.get((first, a.task_id)), a) for a in mine]
        solved = sorted(
            ((b, a) for b, a in pairs if a.passed), key=lambda pair: pair[0] is not None and pair[0].passed
        )
        failing = [(b, a) for b, a in pairs if not a.passed]
        samples += [Sample(domain, True, b, a) for b, a in solved[:each]]
        samples += [Sample(domain, False, b, a) for b, a in failing[:each]]
    return samples
