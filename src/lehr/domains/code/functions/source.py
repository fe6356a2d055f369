"""The task source of ``code/functions``."""

from __future__ import annotations

import random
from typing import Any

from lehr.core.task import Gold, Problem, Split
from lehr.domains.base import DomainCard
from lehr.domains.card import task_of
from lehr.domains.code.functions.pipelines import Sketch, sketch
from lehr.domains.splitting import draw_for, stream

SYSTEM = "Answer with one Python function."
FRAMES: dict[Split, tuple[str, ...]] = {
    "train": (
        "Write {call} returning {what}.",
        "Define {call}: it returns {what}.",
        "{call} should return {what}.",
        "I need a function {call} for {what}.",
        "{call}: {what}.",
    ),
    "validation": ("Implement {call} to return {what}.",),
    "heldout": ("Write a function {call} that gives {what}.", "Code {call}; the result is {what}."),
}
NAMES: dict[Split, tuple[str, ...]] = {
    "train": ("f", "solve", "run", "calc", "pick", "work"),
    "validation": ("g", "task"),
    "heldout": ("h", "apply", "process", "make"),
}
WORDS = (
    "tree", "sun", "river", "a", "moon", "stone", "ant", "lemon", "Oslo", "table", "noon", "is", "rat", "Emma",
    "mine", "sense", "to", "owl", "latin", "error", "level", "open", "sail", "Rome",
)  # fmt: skip
TESTS = 8
LEVEL_SHARES = (85, 13, 2)


class FunctionSource:
    """Draws a composition that belongs to the split, words it in the split's own phrases, and makes tests."""

    def problem(self, card: DomainCard, split: Split, index: int) -> Problem:
        """Return one problem."""
        level = stream(card.id, split, index).choices((0, 1, 2), LEVEL_SHARES)[0]
        rng, drawn = draw_for(card.id, split, index, lambda rng: _draw(rng, level))
        name = rng.choice(NAMES[split])
        call = f"{name}({drawn.argument})"
        body = f"def {name}({drawn.argument}):\n    return {drawn.expression}"
        user = rng.choice(FRAMES[split]).format(call=call, what=drawn.wording)
        task = task_of(
            card, split, index, system=SYSTEM, user=user, level=drawn.level, artifacts=("solution.py",)
        )
        tests = [{"args": [value], "want": _call(body, name, value)} for value in inputs(rng, drawn)]
        return Problem(task, Gold((f"```python\n{body}\n```",), {"entry": name, "arity": 1, "tests": tests}))


def _draw(rng: random.Random, level: int) -> tuple[str, Sketch]:
    drawn = sketch(rng, level)
    return (drawn.shape if drawn.level else "", drawn)


def _call(body: str, name: str, value: Any) -> Any:
    """Return what the reference gives; its text is our own, made of the operations in ``pipelines``."""
    scope: dict[str, Any] = {}
    exec(body, scope)
    return scope[name](value)


def inputs(rng: random.Random, drawn: Sketch) -> list[Any]:
    """Return the arguments of the hidden tests: the empty one, values around the constants, random ones."""
    k = next((c for c in drawn.constants if isinstance(c, int)), 3)
    letter = next((c for c in drawn.constants if isinstance(c, str)), "a")
    if drawn.family == "numbers":
        near = [k - 1, k, k + 1, 0, 1, -1, -k, 2 * k]
        return [[], [k], near, near[::-1]] + [
            [rng.randint(-12, 20) for _ in range(rng.randint(4, 9))] for _ in range(TESTS - 4)
        ]
    seeded = [
        letter,
        f"{letter}x",
        f"x{letter}",
        letter * 3,
        "abcdef"[:k],
        "qwertyu"[: k + 1],
        "zyxwvutsr"[: k + 2],
    ]
    matching = [f"{letter}{word}{letter}" for word in rng.sample(WORDS, 6)]
    sentences = [" ".join(rng.sample(WORDS, rng.randint(2, 6))) for _ in range(TESTS - 5)]
    mixed = [*seeded, *matching]
    rng.shuffle(mixed)
    return ["", "noon", " ".join(seeded), " ".join(matching), " ".join(mixed), *sentences]


SOURCE = FunctionSource()
