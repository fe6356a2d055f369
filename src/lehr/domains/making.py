"""Makes a domain's folder from a file of JSON lines, once every line of it has been checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lehr.core.errors import ConfigError
from lehr.core.task import Split
from lehr.domains.card import CARD, built_in_ids, find_cards
from lehr.domains.jsonl import DATA, SPLITS, SYSTEM, Row, numbered_rows, read_lines, with_splits
from lehr.verify.verifiers.fields import score_fields

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*(?:/[a-z0-9][a-z0-9_-]*)*")


@dataclass(frozen=True, slots=True)
class Made:
    """The folder that was written, how many tasks each split has, and how many lines stood there twice."""

    folder: Path
    sizes: Mapping[Split, int]
    repeated: int


def new_from_jsonl(name: str, file: Path, into: Path) -> Made:
    """Write the domain ``name`` below ``into`` from a file of JSON lines. Of equal lines one is kept.

    Raises ``ConfigError`` for a name that cannot be used or is taken, and for a line that cannot be used: its
    answer earns less than full marks, or its prompt stands elsewhere with other fields. Then nothing is
    written.
    """
    _require_free(name, into)
    folder = into / name
    rows = numbered_rows(file)
    _require_one_verdict(rows, file)
    _require_full_marks(rows, file)
    first: dict[tuple[str, str], int] = {}
    for number, row in rows:
        first.setdefault((row.prompt, row.answer), number)
    numbers = set(first.values())
    kept = [row for number, row in rows if number in numbers]
    homes = [home for _, home in with_splits(kept, file)]
    sizes: dict[Split, int] = {split: homes.count(split) for split in SPLITS}
    longest = max(len(row.answer.encode()) for row in kept)
    text = "".join(f"{line}\n" for number, line in read_lines(file) if number in numbers)
    folder.mkdir(parents=True)
    (folder / DATA).write_text(text, encoding="utf-8")
    (folder / CARD).write_text(_card_text(name, file, sizes, max_tokens=min(2048, 32 + longest // 2)))
    return Made(folder, sizes, len(rows) - len(kept))


def _require_free(name: str, into: Path) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"cannot use {name!r} as a domain's name",
            expected="lower-case words joined by /, such as my/tickets",
        )
    if name in built_in_ids():
        raise ConfigError(
            f"{name!r} is a domain that comes with lehr; yours would hide it",
            expected="a name that is free",
            hint=f"Choose another name, such as my/{name.rpartition('/')[2]}.",
        )
    folder = into / name
    if folder.exists():
        raise ConfigError(f"{folder} exists already", hint="Choose another name, or remove the folder.")
    taken = find_cards([into]).get(name) if into.is_dir() else None
    if taken is not None and taken.folder.is_relative_to(into):
        raise ConfigError(
            f"{taken.folder} is a domain of the name {name!r} already",
            hint="Choose another name, or remove the folder.",
        )


def _require_one_verdict(rows: Sequence[tuple[int, Row]], file: Path) -> None:
    """Raise ``ConfigError`` where one prompt stands in two lines with different fields."""
    seen: dict[str, tuple[int, Row]] = {}
    for number, row in rows:
        before, other = seen.setdefault(row.prompt, (number, row))
        if other.fields != row.fields:
            raise ConfigError(
                f"{file}, lines {before} and {number} have the same prompt and different `expected`: "
                f"{row.prompt!r:.80}",
                expected="one right answer for each prompt",
                hint="Remove one of them, or put what tells them apart into the prompt.",
            )


def _require_full_marks(rows: Sequence[tuple[int, Row]], file: Path) -> None:
    """Raise ``ConfigError`` for the first line whose answer the verifier does not give full marks."""
    for number, row in rows:
        score = score_fields(row.answer, row.fields)
        if score.value < 1.0:
            raise ConfigError(
                f"{file}, line {number}: `answer` earns {score.value:.2f} of 1: {score.detail}",
                expected="an answer that is one JSON object with every field of `expected`, and no other",
                hint="Correct `answer` or `expected`, or leave `answer` out.",
            )


def _card_text(name: str, file: Path, sizes: Mapping[Split, int], *, max_tokens: int) -> str:
    splits = "\n".join(f"{split} = {size}" for split, size in sizes.items())
    return f"""id = {json.dumps(name)}
title = {json.dumps(name)}
description = "Made from JSON lines; each field is compared on its parsed value."
source = {json.dumps(file.name)}
licence = "unknown"
generator = "lehr.domains.jsonl:SOURCE"
environment = "answer"
reward = ["match_fields {{ weight: 1.0 }}"]
max_tokens = {max_tokens}
timeout_s = 300

[options]
system = {json.dumps(SYSTEM)}

[splits]
{splits}
"""
