"""Reads amounts as people print them: sign, scale, decimal sign and currency are kept, never guessed away.

(1,234)          -1234
5.0-             -5
$1,234.5 million  1234500000 USD
1.234,56          1234.56
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

CURRENCIES = {
    "$": "USD", "US$": "USD", "€": "EUR", "£": "GBP", "¥": "JPY", "₹": "INR", "Fr.": "CHF", "kr": "SEK",
}  # fmt: skip
CODES = frozenset(
    [
        "USD",
        "EUR",
        "GBP",
        "JPY",
        "INR",
        "CHF",
        "SEK",
        "NOK",
        "DKK",
        "PLN",
        "CZK",
        "CAD",
        "AUD",
        "NZD",
        "CNY",
        "BRL",
        "MXN",
        "ZAR",
    ]
)
SCALES = {
    "k": 3, "thousand": 3, "m": 6, "mn": 6, "mio": 6, "million": 6,
    "bn": 9, "b": 9, "billion": 9, "tn": 12, "trillion": 12,
}  # fmt: skip
MAX_CHARACTERS = 64
_DIGITS = re.compile(r"\d[\d.,'\u00a0\u202f\u2009 ]*\d|\d|\.\d+", re.ASCII)
_GROUPS = re.compile(r"\d{1,3}(?:([.,' ])\d{3})(?:\1\d{3})*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Amount:
    """A number as printed. ``currency`` is an ISO code, or None where none was printed."""

    value: Decimal
    currency: str | None = None


def parse_amount(text: str, *, decimal: str | None = None) -> Amount | None:
    """Return the amount that ``text`` is, or None if it is not exactly one amount.

    decimal: ``.`` or ``,`` where the document's convention is known; without it, a single separator with
    three digits behind it is read as in English (``1,234`` is a thousand, ``1.234`` a fraction).
    """
    text = text.strip().replace("\u2212", "-").replace("\u2013", "-")
    if len(text) > MAX_CHARACTERS:
        return None
    found = _DIGITS.search(text)
    if found is None:
        return None
    before, after = text[: found.start()].strip(), text[found.end() :].strip()
    negative = before.count("(") == 1 and after.count(")") == 1
    if negative:
        before, after = before.replace("(", ""), after.replace(")", "")
    minuses = before.count("-") + after.count("-")
    if minuses > 1 or (minuses and negative):
        return None
    negative = negative or minuses == 1
    before, after = before.replace("-", " ").strip(), after.replace("-", " ").strip()
    before = before.removeprefix("+").strip() if before.startswith("+") else before
    number = _number(found[0], decimal)
    words = [*before.split(), *after.split()]
    currency, scale = _read_words(words)
    if number is None or currency == "" or scale is None:
        return None
    value = number.scaleb(scale)
    return Amount(-value if negative else value, currency or None)


def _read_words(words: list[str]) -> tuple[str | None, int | None]:
    """Return (currency or None, power of ten); ("", None) for words that belong to no amount."""
    currency: str | None = None
    scale: int | None = None
    for word in words:
        code = CURRENCIES.get(word) or (word if word in CODES else None)
        if code and currency is None:
            currency = code
        elif word.lower().rstrip(".") in SCALES and scale is None:
            scale = SCALES[word.lower().rstrip(".")]
        else:
            return "", None
    return currency, scale or 0


def _number(text: str, decimal: str | None) -> Decimal | None:
    text = re.sub("[\u00a0\u202f\u2009]", " ", text)
    decimal = decimal or _decimal_sign(text)
    whole, sign, fraction = text.rpartition(decimal) if decimal in text else (text, "", "")
    if sign and not (fraction.isdigit() and whole.count(decimal) == 0):
        return None
    if whole and not whole.isdigit():
        if not _GROUPS.fullmatch(whole) or decimal in whole:
            return None
        whole = re.sub(r"\D", "", whole)
    if not whole and not fraction:
        return None
    return Decimal(f"{whole or '0'}.{fraction}" if sign else whole)


def _decimal_sign(text: str) -> str:
    last = max(text.rfind("."), text.rfind(","))
    if last < 0:
        return "."
    mark, other = text[last], "," if text[last] == "." else "."
    if other in text:
        return mark
    if text.count(mark) > 1:
        return other
    if mark == "," and len(text) - last - 1 == 3:
        return "."
    return mark
