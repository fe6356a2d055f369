"""What an answer has to look like, as the request says: a format, a call of a tool, or either.

Calls are held to the form in which the model's chat template writes them: JSON in tags, or JSON alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from lehr.core.trace import Constraint
from lehr.engine.native.guides import SPACE
from lehr.model.chat import CallForm
from lehr.model.messages import CLOSE, OPEN


def answer_shape(schema: dict[str, Any] | None) -> Constraint:
    """Return the constraint of an answer that is any JSON object, or what ``schema`` admits."""
    return Constraint("json") if schema is None else Constraint("schema", json.dumps(schema))


def call_shape(
    tools: Sequence[tuple[str, dict[str, Any] | None, bool]],
    form: CallForm,
    *,
    forced: bool,
    answer: Constraint | None = None,
) -> Constraint:
    """Return the constraint of an answer in which ``tools`` (name, schema of the arguments, strict) are called.

    forced: one call and nothing else. Otherwise as many as the model likes, or an ``answer``, which may be any
    text where it is None. Arguments are held to the schema; where it is not strict, keywords that no text can
    be held to are passed over.
    """
    tagged = form == "tagged"
    rules = [_call(number, *tool, form) for number, tool in enumerate(tools)]
    body = "(" + " | ".join(f"call_{number}" for number in range(len(tools))) + ")"
    whole = f"{_text(OPEN)} WS? {body} WS? {_text(CLOSE)}" if tagged else body
    rules.append("WS: /[ \\n]{1,2}/")
    if forced:
        start = [f"start: {whole}"]
    elif answer is not None:
        start = [f"start: {whole} | %json {_schema(answer)}"]
    elif tagged:
        start = [
            "start: tagged* TEXT",
            f"tagged: begin WS? {body} WS? {_text(CLOSE)}",
            f"begin[lazy]: TEXT {_text(OPEN)}",
            "TEXT: /(.|\\n)*/",
        ]
    else:
        start = [f"start: {whole} | TEXT", "TEXT: /([^{](.|\\n)*)?/"]
    return Constraint("grammar", "\n".join([*start, *rules]))


def _call(number: int, name: str, schema: dict[str, Any] | None, strict: bool, form: CallForm) -> str:
    field = "parameters" if form == "bare" else "arguments"
    head = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{field}": '
    options = {"lenient": not strict, "whitespace_pattern": SPACE}
    arguments = {"type": "object", **(schema or {}), "x-guidance": options}
    return f"call_{number}: {_text(head)} %json {json.dumps(arguments)} {_text('}')}"


def _schema(answer: Constraint) -> str:
    schema = json.loads(answer.text) if answer.text else {"type": "object"}
    return json.dumps(schema | {"x-guidance": {"lenient": False, "whitespace_pattern": SPACE}})


def _text(text: str) -> str:
    """Return ``text`` as it stands in a grammar."""
    return json.dumps(text, ensure_ascii=False)
