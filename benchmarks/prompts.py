"""Chat prompts of the kind that training runs send: short, all different, over four kinds of task."""

from __future__ import annotations

import random

_NOUNS = (
    "invoices",
    "orders",
    "sensors",
    "tickets",
    "parcels",
    "songs",
    "lessons",
    "recipes",
    "trains",
    "plants",
)
_VERBS = ("sorted", "grouped", "counted", "filtered", "merged", "reversed", "deduplicated", "paired")
_FIELDS = ("total", "date", "currency", "number", "supplier", "tax", "due_date", "discount")
_NAMES = ("Almeida", "Brandt", "Chen", "Dubois", "Eriksen", "Farouk", "Greco", "Huang", "Ivanova", "Jansen")


def chat_prompts(count: int, seed: int = 0) -> list[str]:
    """Return ``count`` distinct user messages; equal arguments give equal messages."""
    draw = random.Random(seed)
    makers = (_code, _document, _terminal, _reasoning)
    found: dict[str, None] = {}
    while len(found) < count:
        found[makers[len(found) % len(makers)](draw)] = None
    return list(found)


def _code(draw: random.Random) -> str:
    noun, verb, low = draw.choice(_NOUNS), draw.choice(_VERBS), draw.randrange(2, 90)
    return (
        f"Write a Python function {verb}_{noun}(items) that returns the {noun} {verb} by their second value, "
        f"leaving out those below {low}. Answer with code only."
    )


def _document(draw: random.Random) -> str:
    wanted = draw.sample(_FIELDS, 3)
    net = draw.randrange(1000, 99999) / 100
    return (
        f"INVOICE {draw.randrange(10000, 99999)}\n{draw.choice(_NAMES)} & {draw.choice(_NAMES)} Ltd\n"
        f"Net {net:,.2f}  VAT {net * 0.2:,.2f}  Total EUR {net * 1.2:,.2f}\n"
        f"Return {wanted[0]}, {wanted[1]} and {wanted[2]} as one JSON object."
    )


def _terminal(draw: random.Random) -> str:
    noun, other = draw.sample(_NOUNS, 2)
    return (
        f"In the folder {noun} there are {draw.randrange(3, 30)} text files. Move those that contain the word "
        f"{draw.choice(_NAMES)} to {other}, and tell me how many were moved. Use shell commands."
    )


def _reasoning(draw: random.Random) -> str:
    a, b, c = draw.randrange(3, 60), draw.randrange(3, 60), draw.randrange(2, 9)
    who, noun = draw.choice(_NAMES), draw.choice(_NOUNS)
    return (
        f"{who} has {a} {noun}, gives away {c} and then buys {b} more every week. How many after {c + 2} weeks?"
    )
