"""``match_answer``: one short final answer, compared strictly after reading it as what it should be.

``gold.data`` holds ``answer`` (text) and ``kind``, one of the kinds below. The final answer is what stands
behind the last ``Answer:``, else the whole completion, which must then be one line.

    integer    a whole number, possibly in brackets, with a currency sign or a full stop
    decimal    a decimal number, compared exactly
    fraction   a fraction in lowest terms (also as LaTeX), or a whole number
    text       the same characters, after joining white space
    word       as text, without regard to upper and lower case or a full stop
    list       items divided by commas, each as text
    numbers    a bracketed list of numbers, compared exactly, in order
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from math import gcd
from typing import Any

from lehr.core.episode import Evidence
from lehr.core.task import Gold, Task
from lehr.sandbox.base import Boxes
from lehr.verify.base import NoScore, Score

ANSWER_CHARACTERS = 4096
_MARKER = re.compile(r"answer\s*:", re.IGNORECASE)
_INTEGER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,200})(?:\.0{1,20})?", re.ASCII)
_DECIMAL = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,200})?(?:\.\d{1,200})?", re.ASCII)
_LATEX_FRACTION = re.compile(r"\\d?frac\{([-+]?\d{1,200})\}\{(\d{1,200})\}", re.ASCII)
_FRACTION = re.compile(r"([-+]?\d{1,200})(?:\s*/\s*(\d{1,200}))?", re.ASCII)


async def match_answer(task: Task, evidence: Evidence, gold: Gold, boxes: Boxes) -> Score | NoScore:
    """Return 1 if the final answer is the expected one, else 0."""
    del boxes
    kind, answer = gold.data.get("kind"), gold.data.get("answer")
    read = KINDS.get(str(kind))
    if read is None or not isinstance(answer, str) or read(answer) is None:
        return NoScore("verifier_crash", f"{task.id} has no {kind} answer to compare with")
    said = final_answer(evidence.answer)
    if said is None:
        return Score(0.0, "no single final answer")
    got = read(said)
    return Score(1.0, "right") if got is not None and got == read(answer) else Score(0.0, "wrong")


def final_answer(text: str) -> str | None:
    """Return the text behind the last marker, or the whole text; None unless it is one non-empty line."""
    if len(text) > ANSWER_CHARACTERS:
        return None
    *_, last = _MARKER.split(text)
    lines = [line.strip() for line in last.strip().splitlines()]
    return lines[0] if len(lines) == 1 and lines[0] else None


def _bare(text: str) -> str:
    text = text.strip().replace("\u2212", "-")
    while text and (stripped := _unwrapped(text)) != text:
        text = stripped
    return text


def _unwrapped(text: str) -> str:
    for opening, closing in (("(", ")"), ("[", "]"), ("**", "**"), ("`", "`"), ("$", "$")):
        if len(text) > len(opening + closing) and text.startswith(opening) and text.endswith(closing):
            return text[len(opening) : -len(closing)].strip()
    return text[1:].strip() if text.startswith(("$", "=")) else text.rstrip(".!?; ")


def _integer(text: str) -> int | None:
    text = _bare(text)
    if not _INTEGER.fullmatch(text):
        return None
    return int(text.partition(".")[0].replace(",", ""))


def _decimal(text: str) -> Decimal | None:
    text = _bare(text)
    if not _DECIMAL.fullmatch(text) or not any(c.isdigit() for c in text):
        return None
    return Decimal(text.replace(",", ""))


def _fraction(text: str) -> Fraction | None:
    text = _bare(text)
    found = _LATEX_FRACTION.fullmatch(text) or _FRACTION.fullmatch(text)
    if found is None:
        return None
    above, below = int(found[1]), int(found[2] or 1)
    if below == 0 or gcd(above, below) != 1:
        return None
    return Fraction(above, below)


def _text(text: str) -> str | None:
    return " ".join(text.split()) or None


def _word(text: str) -> str | None:
    return " ".join(text.strip("\"'`*").rstrip(".!").split()).casefold() or None


def _list(text: str) -> tuple[str, ...] | None:
    items = tuple(" ".join(item.split()) for item in text.split(","))
    return items if all(items) else None


def _numbers(text: str) -> tuple[Decimal, ...] | None:
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return None
    if not text[1:-1].strip():
        return ()
    items = [_decimal(item.strip().strip("'\"")) for item in text[1:-1].split(",")]
    return tuple(item for item in items if item is not None) if None not in items else None


KINDS: dict[str, Callable[[str], Any]] = {
    "integer": _integer,
    "decimal": _decimal,
    "fraction": _fraction,
    "text": _text,
    "word": _word,
    "list": _list,
    "numbers": _numbers,
}
