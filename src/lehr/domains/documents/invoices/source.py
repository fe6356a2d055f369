"""The task source of ``documents/invoices``."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

from lehr.core.task import Gold, Problem, Split
from lehr.domains.base import DomainCard
from lehr.domains.card import task_of
from lehr.domains.documents.invoices import layouts
from lehr.domains.splitting import stream

SYSTEM = "Answer with one JSON object."
ASKS: dict[Split, tuple[str, ...]] = {
    "train": (
        "Give {keys} as JSON.",
        "JSON with {keys}:",
        "Extract {keys}.",
        "What are {keys}? Use JSON.",
        "Write a JSON object of {keys}.",
        "Fields: {keys}",
    ),
    "validation": ("Extract {keys} as JSON.",),
    "heldout": ("Return {keys} as JSON.", "Write {keys} as a JSON object."),
}
NAMES: dict[Split, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "train": (
        ("Acme", "North", "Blue", "Green", "Star", "Delta", "Silver", "Oak", "River"),
        ("Foods", "Tools", "Press", "Motors", "Labs", "Books"),
    ),
    "validation": (("Alpha", "West", "Red"), ("Media", "Farms")),
    "heldout": (("Iron", "South", "Gold", "Lake", "Sun", "Royal"), ("Paper", "Design", "Trading", "Works")),
}
PREFIXES: dict[Split, tuple[str, ...]] = {
    "train": ("INV-", "A", "R-", "20", "X"),
    "validation": ("V-",),
    "heldout": ("DOC-", "B", "K-", "70"),
}
LEVEL_SHARES = (70, 25, 5)


class InvoiceSource:
    """Draws facts, prints them in the split's own layouts and labels, and asks for two or three of them."""

    def problem(self, card: DomainCard, split: Split, index: int) -> Problem:
        """Return one problem."""
        rng = stream(card.id, split, index)
        level = rng.choices((0, 1, 2), LEVEL_SHARES)[0]
        style = layouts.draw_style(rng, level)
        facts = _facts(rng, split)
        asked = _asked(rng, level)
        text = layouts.render(rng, split, _lines(rng, split, style, facts, asked))
        keys = ", ".join(json.dumps(key) for key in asked)
        user = f"{text}\n{rng.choice(ASKS[split]).format(keys=keys)}"
        task = task_of(card, split, index, system=SYSTEM, user=user, level=level)
        fields = {key: _field(key, facts) for key in asked}
        return Problem(task, Gold((_gold(asked, facts),), {"fields": fields}))


def _facts(rng: random.Random, split: Split) -> dict[str, Any]:
    first, second = NAMES[split]
    digits = rng.choice((2, 3, 4))
    total = Decimal(rng.randint(10 ** (digits + 1), 10 ** (digits + 2) - 1)).scaleb(-2)
    return {
        "number": f"{rng.choice(PREFIXES[split])}{rng.randint(100, 9999)}",
        "date": date(2019, 1, 1) + timedelta(days=rng.randrange(2500)),
        "customer": f"{rng.choice(first)} {rng.choice(second)}",
        "currency": rng.choice(list(layouts.SYMBOLS)),
        "total": -total if rng.random() < 0.25 else total,
        "tax": Decimal(rng.randint(200, 9999)).scaleb(-2),
        "other": Decimal(rng.randint(1000, 99999)).scaleb(-2),
    }


def _asked(rng: random.Random, level: int) -> list[str]:
    asked = ["total", *rng.sample(("number", "customer", "currency", "tax", "date"), 1 if level == 0 else 2)]
    rng.shuffle(asked)
    return asked


def _lines(
    rng: random.Random, split: Split, style: layouts.Style, facts: Mapping[str, Any], asked: list[str]
) -> list[tuple[str, str]]:
    labels = layouts.LABELS[split]
    printed = {
        "number": facts["number"],
        "customer": facts["customer"],
        "date": layouts.print_date(facts["date"], style),
        "tax": layouts.print_amount(facts["tax"], facts["currency"], style),
        "total": layouts.print_amount(facts["total"], facts["currency"], style),
    }
    extra = rng.sample(("number", "customer", "date"), 1) if rng.random() < 0.6 else []
    shown = [key for key in ("number", "customer", "date", "tax") if key in asked or key in extra]
    lines = [(rng.choice(labels[key]), printed[key]) for key in shown]
    lines.append((rng.choice(labels["total"]), printed["total"]))
    other = rng.choice(layouts.DISTRACTORS[split])
    place = rng.choice((len(lines) - 1, len(lines)))
    lines.insert(place, (other, layouts.print_amount(facts["other"], facts["currency"], style)))
    return lines


def _field(key: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    if key in ("total", "tax"):
        return {"type": "amount", "value": str(facts[key]), "currency": facts["currency"]}
    if key == "date":
        return {"type": "date", "value": facts["date"].isoformat()}
    return {"type": "text", "value": facts[key]}


def _gold(asked: list[str], facts: Mapping[str, Any]) -> str:
    parts = [
        f'"{key}": {facts[key]}' if key in ("total", "tax") else f'"{key}": {json.dumps(str(facts[key]))}'
        for key in asked
    ]
    return "{" + ", ".join(parts) + "}"


SOURCE = InvoiceSource()
