"""A user's own domain from a file of JSON lines.

Each line is ``{"prompt": "...", "expected": {"field": value, ...}}`` with an optional ``"answer"`` (a full
completion; the expected fields as one JSON line where it is missing). The kind of a field follows from its
values: whole numbers, decimal numbers, dates as ``YYYY-MM-DD``, true or false, else text.
:mod:`lehr.domains.making` writes such a domain.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from lehr.core.errors import ConfigError
from lehr.core.task import Gold, Problem, Split
from lehr.domains.base import DomainCard, Source
from lehr.domains.card import CARD, task_of

DATA = "data.jsonl"
SYSTEM = "Answer with one JSON object."
SHAPE = '{"prompt": "...", "expected": {"field": value}}'
FEWEST = 8
LARGEST_BYTES = 256 << 20
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
SPLITS: tuple[Split, ...] = ("train", "validation", "heldout")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the file."""

    prompt: str
    fields: Mapping[str, Mapping[str, Any]]
    answer: str

    @classmethod
    def parse(cls, line: str, where: str) -> Row:
        """Return the row, or raise ``ConfigError`` that names the line and what is wrong with it."""
        try:
            raw = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON ({error})", expected=SHAPE) from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{where}: not an object", expected=SHAPE)
        raw = cast("dict[str, Any]", raw)
        unknown = sorted(set(raw) - {"prompt", "expected", "answer"})
        if unknown:
            raise ConfigError(f"{where}: unknown key {unknown[0]!r}", expected=SHAPE)
        prompt, expected = raw.get("prompt"), raw.get("expected")
        if not isinstance(prompt, str) or not prompt.strip():
            raise ConfigError(f"{where}: `prompt` is missing or empty", expected=SHAPE)
        if not isinstance(expected, dict) or not expected:
            raise ConfigError(f"{where}: `expected` is not an object with at least one field", expected=SHAPE)
        values = cast("dict[str, Any]", expected)
        fields = {name: _field(value, f"{where}: expected[{name!r}]") for name, value in values.items()}
        answer = raw.get("answer", json.dumps(values, ensure_ascii=False))
        if not isinstance(answer, str):
            raise ConfigError(f"{where}: `answer` is not text", expected=SHAPE)
        return cls(prompt, fields, answer)


def _field(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {"type": "null", "value": None}
    if isinstance(value, bool):
        return {"type": "boolean", "value": value}
    if isinstance(value, int):
        return {"type": "integer", "value": value}
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            raise ConfigError(f"{where} is not a finite number")
        return {"type": "amount", "value": repr(value)}
    if isinstance(value, str):
        return {"type": "date" if _is_date(value) else "text", "value": value}
    raise ConfigError(f"{where} is a list or an object", expected="text, a number, true, false or null")


def _is_date(text: str) -> bool:
    try:
        return bool(_DATE.fullmatch(text)) and bool(datetime.date.fromisoformat(text))
    except ValueError:
        return False


class JsonlSource:
    """Reads ``data.jsonl`` of the domain's folder; each split is a list of its lines."""

    def bind(self, folder: Path) -> Source:
        """Return the source of one folder."""
        return _Bound(folder)


class _Bound:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _rows(self) -> Mapping[Split, Sequence[Row]]:
        return {
            split: [row for row, home in read_rows(self._folder / DATA) if home == split] for split in SPLITS
        }

    def problem(self, card: DomainCard, split: Split, index: int) -> Problem:
        rows = self._rows[split]
        if index >= len(rows):
            raise ConfigError(
                f"{self._folder / DATA} has {len(rows)} tasks of split {split!r}, its {CARD} says "
                f"{card.splits.get(split, 0)}",
                hint=f"Correct `splits` in {self._folder / CARD}, or make the domain again.",
            )
        row = rows[index]
        task = task_of(card, split, index, system=str(card.options.get("system", SYSTEM)), user=row.prompt)
        return Problem(task, Gold((row.answer,), {"fields": row.fields}))


def read_rows(file: Path) -> list[tuple[Row, Split]]:
    """Return every row with its split. Rows with the same prompt go to the same split.

    About one in six prompts is held out and one in ten is for validation, by a hash of the prompt; each of the
    three gets at least one. Raises ``ConfigError`` naming the line.
    """
    return with_splits([row for _, row in numbered_rows(file)], file)


def with_splits(rows: Sequence[Row], file: Path) -> list[tuple[Row, Split]]:
    """Return ``rows``, which came from ``file``, each with its split. Raises ``ConfigError`` for too few."""
    prompts = sorted({row.prompt for row in rows}, key=_hash)
    if len(prompts) < FEWEST:
        raise ConfigError(
            f"{file} has {len(prompts)} different prompts",
            expected=f"at least {FEWEST}, so that training, validation and held-out tasks differ",
            hint="Add lines.",
        )
    heldout, validation = max(1, len(prompts) // 6), max(1, len(prompts) // 10)
    homes: dict[str, Split] = dict.fromkeys(prompts, "train")
    homes.update(dict.fromkeys(prompts[:heldout], "heldout"))
    homes.update(dict.fromkeys(prompts[heldout : heldout + validation], "validation"))
    return [(row, homes[row.prompt]) for row in rows]


def numbered_rows(file: Path) -> list[tuple[int, Row]]:
    """Return every row with the number of its line. Raises ``ConfigError`` naming the line."""
    rows = [(n, Row.parse(line, f"{file}, line {n}")) for n, line in read_lines(file)]
    read = _with_kinds_by_column([row for _, row in rows])
    return [(n, row) for (n, _), row in zip(rows, read, strict=True)]


def read_lines(file: Path) -> list[tuple[int, str]]:
    """Return the lines that are not blank, with their numbers."""
    try:
        if file.stat().st_size > LARGEST_BYTES:
            raise ConfigError(f"{file} is larger than {LARGEST_BYTES >> 20} MiB")
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(f"no such file: {file}", hint="Check the path.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {file}: {error}", expected="UTF-8 text") from error
    return [(n, line) for n, line in enumerate(lines, 1) if line.strip()]


def _with_kinds_by_column(rows: list[Row]) -> list[Row]:
    """Read whole numbers as decimal ones where the same field has decimals in another row."""
    decimal = {name for row in rows for name, field in row.fields.items() if field["type"] == "amount"}

    def read(name: str, field: Mapping[str, Any]) -> Mapping[str, Any]:
        if name in decimal and field["type"] == "integer":
            return {"type": "amount", "value": str(field["value"])}
        return field

    return [
        replace(row, fields={name: read(name, field) for name, field in row.fields.items()}) for row in rows
    ]


def _hash(prompt: str) -> str:
    return hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()


SOURCE = JsonlSource()
