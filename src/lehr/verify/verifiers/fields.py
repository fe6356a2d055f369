"""``match_fields``: compares a JSON object, field by field, on parsed values.

``gold.data["fields"]`` maps each asked key to ``{"type": t, "value": v}`` with the types below. The answer
must hold exactly one JSON object. Keys that were not asked for count as wrong ones, so that listing more
never earns more; a list of candidates is not a value.

    amount    decimal number, as JSON number or as printed; with ``currency`` in the field, a printed
              currency must agree
    integer   whole number
    date      the day, as YYYY-MM-DD
    text      equal after trimming and joining white space
    boolean, null   exactly that
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping
from decimal import Decimal, InvalidOperation
from typing import Any, cast

from lehr.core.episode import Evidence
from lehr.core.task import Gold, Task
from lehr.sandbox.base import Boxes
from lehr.verify.amounts import parse_amount
from lehr.verify.base import NoScore, Score

ANSWER_CHARACTERS = 16 << 10
_FENCE = re.compile(r"\s*```(?:json)?[ \t]*\n(.*?)\n?```\s*", re.DOTALL)

Field = Mapping[str, Any]


async def match_fields(task: Task, evidence: Evidence, gold: Gold, boxes: Boxes) -> Score | NoScore:
    """Return the share of right fields among all fields asked or given."""
    del boxes
    fields: Mapping[str, Field] = gold.data.get("fields", {})
    if not fields:
        return NoScore("verifier_crash", f"{task.id} expects no fields")
    return score_fields(evidence.answer, fields)


def score_fields(answer: str, fields: Mapping[str, Field]) -> Score:
    """Return the share of ``fields`` that ``answer`` holds, and which are wrong."""
    given = read_object(answer)
    if given is None:
        return Score(0.0, "the answer is not one JSON object")
    wrong: list[str] = [name for name, field in fields.items() if not _right(field, given, name)]
    extra = sorted(set(given) - set(fields))
    detail = f"{len(fields) - len(wrong)} of {len(fields)} fields right"
    detail += f"; wrong: {', '.join(wrong)}" if wrong else ""
    detail += f"; not asked for: {', '.join(extra)[:80]}" if extra else ""
    return Score((len(fields) - len(wrong)) / (len(fields) + len(extra)), detail)


def read_object(text: str) -> Mapping[str, Any] | None:
    """Return the one JSON object that ``text`` is (a code fence around it is allowed), else None. Numbers
    are read as ``Decimal`` or ``int``; repeated keys and NaN are refused.
    """
    if len(text) > ANSWER_CHARACTERS:
        return None
    fenced = _FENCE.fullmatch(text)
    try:
        value = json.loads(
            fenced[1] if fenced else text,
            parse_float=Decimal,
            parse_constant=_refuse,
            object_pairs_hook=_unique,
        )
    except (ValueError, RecursionError, InvalidOperation):
        return None
    return cast("Mapping[str, Any]", value) if isinstance(value, dict) else None


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found


def _right(field: Field, given: Mapping[str, Any], name: str) -> bool:
    return name in given and COMPARE[field["type"]](given[name], field)


def _amount(got: Any, field: Field) -> bool:
    want = Decimal(str(field["value"]))
    if type(got) is int or type(got) is Decimal:
        return got == want
    if type(got) is not str:
        return False
    amount = parse_amount(got)
    if amount is None:
        return False
    currency = field.get("currency")
    return amount.value == want and (currency is None or amount.currency in (None, currency))


def _integer(got: Any, field: Field) -> bool:
    if type(got) is str and re.fullmatch(r"-?\d{1,100}", got.strip(), re.ASCII):
        got = int(got)
    return type(got) is int and got == field["value"]


def _date(got: Any, field: Field) -> bool:
    if type(got) is not str or not re.fullmatch(r"\d{4}-\d{2}-\d{2}", got.strip(), re.ASCII):
        return False
    try:
        return datetime.date.fromisoformat(got.strip()) == datetime.date.fromisoformat(str(field["value"]))
    except ValueError:
        return False


def _text(got: Any, field: Field) -> bool:
    return type(got) is str and " ".join(got.split()) == " ".join(str(field["value"]).split())


def _exact(got: Any, field: Field) -> bool:
    return type(got) is type(field["value"]) and got == field["value"]


COMPARE: dict[str, Callable[[Any, Field], bool]] = {
    "amount": _amount,
    "integer": _integer,
    "date": _date,
    "text": _text,
    "boolean": _exact,
    "null": _exact,
}
