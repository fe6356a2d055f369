"""``keeps_rule``: whether a written answer keeps the rule of its task."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from itertools import pairwise

from lehr.core.episode import Evidence
from lehr.core.task import Gold, Task
from lehr.sandbox.base import Boxes
from lehr.verify.base import VERIFIERS, NoScore, Score


def brackets(text: str, size: int) -> bool:
    """Return whether these are ``size`` pairs of balanced brackets."""
    depth = 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, -len(text) - 1)
        if depth < 0:
            return False
    return depth == 0 and len(text) == 2 * size


def palindrome(text: str, size: int) -> bool:
    """Return whether these are ``size`` letters that read the same from behind."""
    return _letters(text, size) and text == text[::-1]


def rising(text: str, size: int) -> bool:
    """Return whether these are ``size`` letters, each later than the one before."""
    return _letters(text, size) and all(a < b for a, b in pairwise(text))


def right_sum(text: str, size: int) -> bool:
    """Return whether this is a right sum of two digits that are at most ``size``."""
    found = re.fullmatch(r"(\d)\+(\d)=(\d{1,2})", text, re.ASCII)
    if found is None:
        return False
    first, second, total = map(int, found.groups())
    return max(first, second) <= size and first + second == total


def _letters(text: str, size: int) -> bool:
    return len(text) == size and set(text) <= set(string.ascii_lowercase)


RULES: Mapping[str, Callable[[str, int], bool]] = {
    "brackets": brackets,
    "palindrome": palindrome,
    "rising": rising,
    "sum": right_sum,
}


async def keeps_rule(task: Task, evidence: Evidence, gold: Gold, boxes: Boxes) -> Score | NoScore:
    """Return 1 if the answer keeps the rule that ``gold.data`` names, else 0."""
    del boxes
    rule, size = RULES.get(str(gold.data.get("rule"))), gold.data.get("size")
    if rule is None or not isinstance(size, int):
        return NoScore("verifier_crash", f"{task.id} has no rule to keep")
    return Score(float(rule(evidence.answer.strip(), size)), "")


VERIFIERS.register("keeps_rule", keeps_rule)
