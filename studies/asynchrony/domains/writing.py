"""Four things to write that a rule can check and of which there are many.

A model of a few layers gets some right after a few demonstrations, and reinforcement learning finds out which
of them it gets right most surely. Option in ``domain.toml``: ``rule``, a key of :data:`WRITTEN`. The rules
themselves stand in ``studies/asynchrony/rules.py``.
"""

import random
import string
from collections.abc import Callable, Mapping

from lehr.core.errors import UnknownName
from lehr.core.task import Gold, Problem, Split
from lehr.domains.base import DomainCard
from lehr.domains.card import task_of
from lehr.domains.splitting import stream

SYSTEM = "Reply with the answer only."


def _brackets(rng: random.Random, size: int) -> str:
    found, depth, left = "", 0, size
    while left or depth:
        if left and (depth == 0 or rng.random() < 0.5):
            found, depth, left = found + "(", depth + 1, left - 1
        else:
            found, depth = found + ")", depth - 1
    return found


def _palindrome(rng: random.Random, size: int) -> str:
    half = "".join(rng.choices(string.ascii_lowercase, k=(size + 1) // 2))
    return half + half[::-1][size % 2 :]


def _rising(rng: random.Random, size: int) -> str:
    return "".join(sorted(rng.sample(string.ascii_lowercase, size)))


def _sum(rng: random.Random, size: int) -> str:
    first = rng.randint(0, size)
    second = rng.randint(0, size)
    return f"{first}+{second}={first + second}"


WRITTEN: Mapping[str, tuple[str, Callable[[random.Random, int], str]]] = {
    "brackets": ("Write {size} pairs of balanced brackets.", _brackets),
    "palindrome": ("Write a palindrome of {size} letters.", _palindrome),
    "rising": ("Write {size} letters, each later in the alphabet than the one before.", _rising),
    "sum": ("Add two digits from 0 to {size} and write the whole sum.", _sum),
}
SIZES = (2, 3, 4)


class Writing:
    """Asks for something of a size. Answers are not unique, so that splits may share a question."""

    def problem(self, card: DomainCard, split: Split, index: int) -> Problem:
        """Return one problem. Raises ``UnknownName`` for a rule that there is not."""
        rule = str(card.options.get("rule", ""))
        if rule not in WRITTEN:
            raise UnknownName.among("rule", rule, WRITTEN)
        rng = stream(card.id, split, index)
        asked, write = WRITTEN[rule]
        size = rng.choice(SIZES)
        task = task_of(card, split, index, system=SYSTEM, user=asked.format(size=size))
        return Problem(task, Gold((write(rng, size),), {"rule": rule, "size": size}))


SOURCE = Writing()
