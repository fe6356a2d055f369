"""Conversations in a JSONL file as training data: read, checked line by line, and rendered with a loss mask.

A line is an object with ``messages`` in the form of OpenAI's API (roles, tool calls, and ``weight: 0`` at an
answer that is not to be imitated) and perhaps ``tools``; or with ``prompt`` and ``completion``, each a text or
messages. Other keys of a line are its author's and are not read.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
from pydantic import Field, ValidationError, field_validator, model_validator

from lehr.core.batch import Sample
from lehr.core.errors import ConfigError
from lehr.core.task import Message, ToolSpec
from lehr.model.chat import ChatRenderer
from lehr.model.messages import CalledFunction, ChatMessage, Part, Tool, ToolCall, without_null

SHOWN_PROBLEMS = 8
"""Bad lines that are told one by one; of more there is a count."""

T = TypeVar("T")
TooLong = Literal["refuse", "cut"]


class _Function(CalledFunction):
    @field_validator("arguments", mode="before")
    @classmethod
    def _as_text(cls, raw: object) -> object:
        return json.dumps(raw, ensure_ascii=False) if isinstance(raw, dict) else raw


class _Call(ToolCall):
    function: _Function  # pyright: ignore[reportIncompatibleVariableOverride]


class _Said(ChatMessage):
    tool_calls: list[_Call] = Field(default_factory=list[_Call])  # pyright: ignore[reportIncompatibleVariableOverride]
    weight: Literal[0, 1] = 1


class _Line(Part):
    messages: list[_Said] = Field(min_length=1)
    tools: list[Tool] = Field(default_factory=list[Tool])

    @model_validator(mode="after")
    def _teaches(self) -> _Line:
        if self.messages[0].role == "assistant":
            raise ValueError(
                "the first message is the assistant's; expected one of the system or the user before it"
            )
        if not any(m.role == "assistant" and m.weight for m in self.messages):
            raise ValueError("no message of the assistant to learn from; expected at least one")
        return self


@dataclass(frozen=True, slots=True)
class Conversation:
    """One line: messages as the chat template takes them. learnt: which of them carry loss. where: file and
    line.
    """

    messages: tuple[Message, ...]
    learnt: tuple[bool, ...]
    tools: tuple[ToolSpec, ...] = ()
    where: str = ""


@dataclass(frozen=True, slots=True)
class Rendered:
    """The samples of a set of conversations. ``cut`` and ``refused`` count those that were too long."""

    samples: tuple[Sample, ...]
    cut: int = 0
    refused: int = 0


def read_conversations(path: Path, renderer: ChatRenderer | None = None) -> list[Conversation]:
    """Return the conversations of a file. Tool calls are written as the model of ``renderer`` writes them.

    Raises what :func:`read_jsonl` does.
    """
    return read_jsonl(
        path,
        lambda line, where: _conversation(_parse(line), renderer, where),
        expected='{"messages": [{"role": "user", "content": …}, {"role": "assistant", …}]}',
    )


def _require_whole_characters(line: bytes) -> None:
    if b"\\ud" not in line.lower():  # JSON has no other way to write half a character
        return
    try:
        text = json.dumps(json.loads(line), ensure_ascii=False)
    except (ValueError, RecursionError):
        return  # ``parse`` says what is wrong with it
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(f"{half!r} is half of a surrogate pair; expected whole characters") from error


def read_jsonl(path: Path, parse: Callable[[bytes, str], T], *, expected: str) -> list[T]:
    """Return what ``parse`` makes of each line that is not blank and of its place, ``FILE:LINE``.

    Raises :class:`ConfigError` that names every line for which ``parse`` raised ``ValueError``, up to
    :data:`SHOWN_PROBLEMS`, with lines like ``expected`` as what was expected.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path.absolute()}: {error.strerror}",
            expected="a file with one JSON object a line",
            hint="Check the path; a relative one counts from where the command is typed.",
        ) from error
    found: list[T] = []
    problems: list[str] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            _require_whole_characters(line)
            found.append(parse(line, f"{path}:{number}"))
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems:
        rest = len(problems) - SHOWN_PROBLEMS
        more = [f"and {rest} more"] if rest > 0 else []
        raise ConfigError(
            "\n  ".join([f"{len(problems)} lines cannot be used:", *problems[:SHOWN_PROBLEMS], *more]),
            expected=f"lines like {expected}",
            hint="Mend or remove them.",
        )
    if not found:
        raise ConfigError(f"{path} is empty", expected=f"lines like {expected}")
    return found


def render(
    conversations: Sequence[Conversation],
    renderer: ChatRenderer,
    *,
    max_tokens: int,
    too_long: TooLong = "refuse",
) -> Rendered:
    """Return a sample per conversation, loss on the assistant's tokens only.

    One of more than ``max_tokens`` is left out and counted, or cut behind that many; one that then has no token
    with loss is left out as well.
    """
    samples: list[Sample] = []
    cut = refused = 0
    for conversation in conversations:
        sample = to_sample(conversation, renderer)
        if len(sample.tokens) > max_tokens:
            if too_long == "refuse" or not sample.own[:max_tokens].any():
                refused += 1
                continue
            cut += 1
            sample = _shortened(sample, max_tokens)
        samples.append(sample)
    return Rendered(tuple(samples), cut, refused)


def to_sample(conversation: Conversation, renderer: ChatRenderer) -> Sample:
    """Return the tokens of a conversation up to its last answer, each answer with its end of turn."""
    messages, learnt = conversation.messages, conversation.learnt
    answers = [i for i, m in enumerate(messages) if m.role == "assistant"]
    tokens = renderer.start(messages[: answers[0]], conversation.tools)
    own = [False] * len(tokens)
    for place, answer in enumerate(answers):
        said = renderer.complete(messages[answer].content)
        tokens = [*tokens, *said]
        own += [learnt[answer]] * len(said)
        if place + 1 < len(answers):
            tokens = renderer.extend(tokens, messages[answer + 1 : answers[place + 1]])
            own += [False] * (len(tokens) - len(own))
    mask = np.asarray(own, np.bool_)
    return Sample(
        tokens=np.asarray(tokens, np.int32),
        own=mask,
        logprobs=np.zeros(len(mask), np.float32),
        advantages=mask.astype(np.float32),
        prefix="data",
        trace_id=conversation.where,
    )


def held_apart(samples: Sequence[Sample], share: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Return (to train on, held out): ``share`` of the samples, at least one, chosen by what they say and
    ``seed``, so that equal conversations are always on one side. A ``share`` of 0 holds out none.

    Raises :class:`ConfigError` where nothing would be left on either side.
    """
    if share == 0:
        return list(samples), []
    keys = [_key(sample, seed) for sample in samples]
    ordered = sorted(set(keys))
    chosen = set(ordered[: max(1, round(share * len(ordered)))])
    train = [s for s, key in zip(samples, keys, strict=True) if key not in chosen]
    if not train:
        raise ConfigError(
            f"{len(samples)} conversations, {len(ordered)} of them different, are too few to hold any out",
            expected="at least two different ones",
            hint="Add some, or set heldout_share=0 and best_by='rate'.",
        )
    return train, [s for s, key in zip(samples, keys, strict=True) if key in chosen]


def _key(sample: Sample, seed: int) -> bytes:
    return hashlib.blake2b(sample.tokens.tobytes(), digest_size=16, key=str(seed).encode()).digest()


def _shortened(sample: Sample, length: int) -> Sample:
    return Sample(
        tokens=sample.tokens[:length],
        own=sample.own[:length],
        logprobs=sample.logprobs[:length],
        advantages=sample.advantages[:length],
        prefix=sample.prefix,
        trace_id=sample.trace_id,
        domain=sample.domain,
    )


def _parse(line: bytes) -> _Line:
    """Raises ``ValueError`` that says what is wrong with the line."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"a {type(raw).__name__}; expected an object")
    fields = cast("dict[str, Any]", without_null(cast("dict[str, Any]", raw)))
    if "messages" not in fields and {"prompt", "completion"} <= fields.keys():
        fields["messages"] = [*_listed(fields["prompt"], "user"), *_listed(fields["completion"], "assistant")]
    if "messages" not in fields:
        near = difflib.get_close_matches("messages", fields, n=1, cutoff=0.6)
        there = f"{near[0]!r}; did you mean 'messages'?" if near else ", ".join(map(repr, fields)) or "nothing"
        raise ValueError(f"no 'messages', and no 'prompt' with a 'completion'; found {there}")
    try:
        return _Line.model_validate({name: fields[name] for name in ("messages", "tools") if name in fields})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        shown = "" if first["type"] in {"missing", "value_error"} else f" (found {str(first['input'])[:60]!r})"
        raise ValueError(f"{place}: {said}{shown}" if place else said) from error


def _listed(value: object, role: str) -> list[Any]:
    return list(cast("list[Any]", value)) if isinstance(value, list) else [{"role": role, "content": value}]


def _conversation(line: _Line, renderer: ChatRenderer | None, where: str) -> Conversation:
    form = renderer.call_form if renderer is not None else "tagged"
    said = [m.message(form) for m in line.messages]
    learnt = tuple(m.role == "assistant" and m.weight == 1 for m in line.messages)
    return Conversation(tuple(said), learnt, tuple(tool.spec() for tool in line.tools), where)


def as_line(messages: Sequence[Message], more: Mapping[str, Any]) -> str:
    """Return a conversation as a line of such a file, with keys of its author's."""
    body = {"messages": [m.model_dump() for m in messages], **more}
    return json.dumps(body, ensure_ascii=False) + "\n"
