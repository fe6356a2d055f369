"""Tool calls in what a model writes.

Two forms are known: JSON between ``<tool_call>`` and ``</tool_call>`` (Hermes, Qwen), and an answer that is
nothing but JSON with the name of a tool that was offered (Llama). What looks like a call and is none stays
text.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

from lehr.model.messages import CLOSE, OPEN


@dataclass(frozen=True, slots=True)
class Call:
    """``arguments`` is JSON text."""

    name: str
    arguments: str


class ToolStream:
    """Separates calls from text as it comes; text that may still become a call is held back."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._bare: bool | None = None
        self.called = False

    def add(self, text: str) -> list[str | Call]:
        """Return what became final with ``text``."""
        self._held += text
        if self._bare is None and self._held.strip():
            self._bare = self._held.lstrip().startswith("{")
        if self._bare is not False:
            return []
        found: list[str | Call] = []
        while (at := self._held.find(OPEN)) >= 0:
            before = self._held[:at].rstrip()
            close = self._held.find(CLOSE, at)
            if close < 0:
                found.append(before)
                self._held = self._held[len(before) :]
                return self._counted(found)
            call = parse(self._held[at + len(OPEN) : close])
            end = close + len(CLOSE)
            found += [before, call] if call else [self._held[:end]]
            self._held = self._held[end:]
        sure = len(self._held) - _unsure(self._held)
        found.append(self._held[:sure])
        self._held = self._held[sure:]
        return self._counted(found)

    def end(self) -> list[str | Call]:
        """Return what was held back, once no text follows."""
        held, self._held = self._held, ""
        if self._bare:
            call = parse(held)
            return self._counted([call if call and call.name in self._names else held])
        at = held.find(OPEN)
        call = parse(held[at + len(OPEN) :]) if at >= 0 else None
        if call:
            return self._counted([call])
        return self._counted([] if self.called and not held.strip() else [held])

    def _counted(self, found: list[str | Call]) -> list[str | Call]:
        self.called = self.called or any(isinstance(item, Call) for item in found)
        return [item for item in found if item]


def parse(text: str) -> Call | None:
    """Return the call that ``text`` is, or None."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    fields = cast("dict[str, Any]", value)
    name, arguments = fields.get("name"), fields.get("arguments", fields.get("parameters", {}))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        f"{name}{text}".encode()
    except ValueError:  # numbers that JSON does not have, or halves of characters, which no answer can carry
        return None
    return Call(name, text)


def _unsure(text: str) -> int:
    """Return how many of the last characters may belong to a call: its opening, and white space before it."""
    size = next((n for n in range(len(OPEN) - 1, 0, -1) if text.endswith(OPEN[:n])), 0)
    rest = text[: len(text) - size]
    return size + len(rest) - len(rest.rstrip())
