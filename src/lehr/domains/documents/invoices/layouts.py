"""Prints generated facts as short documents."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal

from lehr.core.task import Split

SYMBOLS = {"USD": "$", "EUR": "€", "GBP": "£", "JPY": "¥"}
MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
LABELS: dict[Split, Mapping[str, tuple[str, ...]]] = {
    "train": {
        "number": ("Invoice", "Invoice no.", "Ref", "Number", "Document no.", "Our ref."),
        "date": ("Date", "Issued", "Invoice date", "Billed on", "Dated"),
        "customer": ("Bill to", "Customer", "Client", "Sold to", "Name"),
        "total": ("Total", "Amount due", "Balance due", "Total due", "To pay", "Please pay", "Grand total"),
        "tax": ("Tax", "VAT", "GST", "Tax amount", "incl. VAT"),
    },
    "validation": {
        "number": ("Invoice number",),
        "date": ("Date of invoice",),
        "customer": ("Buyer",),
        "total": ("Total to pay",),
        "tax": ("Sales tax",),
    },
    "heldout": {
        "number": ("Invoice #", "Reference"),
        "date": ("Issue date", "Day of issue"),
        "customer": ("Billed to", "Account"),
        "total": ("Total amount", "Amount payable"),
        "tax": ("VAT amount", "Tax total"),
    },
}
DISTRACTORS: dict[Split, tuple[str, ...]] = {
    "train": ("Subtotal", "Previous balance", "Discount", "Paid", "Net", "Deposit", "Freight", "Last invoice"),
    "validation": ("Before tax", "Credit"),
    "heldout": ("Net amount", "Old balance", "Shipping"),
}
SEPARATORS: dict[Split, tuple[str, ...]] = {
    "train": (": ", " ", " | ", ":  ", " > ", " => "),
    "validation": (" :  ",),
    "heldout": (" : ", " = "),
}


@dataclass(frozen=True, slots=True)
class Style:
    """How a document prints numbers and dates. ``currency_at``: before, after, code or none."""

    decimal: str
    group: str
    negative: str
    currency_at: str
    day: str


def draw_style(rng: random.Random, level: int) -> Style:
    """Draw a style; level 0 prints numbers plainly, level 1 in the English way, level 2 in any."""
    decimal, group = rng.choice(((".", ","), (",", "."), (",", " "))) if level == 2 else (".", ",")
    return Style(
        decimal,
        group if level > 0 else "",
        rng.choice(("-", "()", "after")) if level > 0 else "-",
        rng.choice(("before", "code", "after")),
        rng.choice(("iso", "words", "dots")) if level > 0 else "iso",
    )


def print_amount(value: Decimal, currency: str, style: Style) -> str:
    """Return the amount as the document prints it."""
    whole, _, cents = f"{abs(value):.2f}".partition(".")
    if style.group and len(whole) > 3:
        whole = f"{whole[:-3]}{style.group}{whole[-3:]}"
    text = f"{whole}{style.decimal}{cents}"
    if style.currency_at == "before":
        text = f"{SYMBOLS[currency]}{text}"
    if value < 0:
        text = {"-": f"-{text}", "()": f"({text})", "after": f"{text}-"}[style.negative]
    if style.currency_at == "after":
        return f"{text} {SYMBOLS[currency]}"
    return f"{text} {currency}" if style.currency_at == "code" else text


def print_date(day: date, style: Style) -> str:
    """Return the date as the document prints it."""
    if style.day == "words":
        return f"{day.day} {MONTHS[day.month - 1]} {day.year}"
    return day.strftime("%d.%m.%Y") if style.day == "dots" else day.isoformat()


def render(rng: random.Random, split: Split, lines: list[tuple[str, str]]) -> str:
    """Return the document: labelled lines in one of the split's layouts."""
    separator = rng.choice(SEPARATORS[split])
    return "\n".join(f"{label}{separator}{text}" for label, text in lines)
