"""Bodies of requests: read, checked, and translated to messages and :class:`~lehr.core.trace.Sampling`.

An option is used, or it is refused by name; only what cannot change the result is ignored.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from pydantic import FailFast, Field, ValidationError, field_validator, model_validator

from lehr.app.serve.errors import ApiError, unsupported
from lehr.core.task import ToolSpec
from lehr.core.trace import Sampling
from lehr.model.messages import ChatMessage, Part, Tool, without_null

MOST_CHOICES = 128
"""Completions that one request may ask for, over all its prompts."""
MOST_ALTERNATIVES = 20
"""Likeliest tokens told at each position."""
LEAST_TEMPERATURE = 0.001
"""Above 0; anything smaller overflows the logits that it divides."""

HARMLESS = frozenset(
    {
        "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store",
        "user",
    }
)  # fmt: skip
"""Options that say nothing about the result."""

NEUTRAL: Mapping[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "min_p": 0,
    "min_tokens": 0,
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "suffix": "",
    "top_logprobs": 0,
}
"""Options that are not there, each with the one value that asks for nothing."""

REFUSED = frozenset(
    {
        "audio", "chat_template", "chat_template_kwargs", "function_call", "functions", "ignore_eos",
        "reasoning_effort", "stop_token_ids", "structured_outputs", "verbosity", "web_search_options",
    }
)  # fmt: skip
"""Options that are not there and have no neutral value."""

B = TypeVar("B", bound="Body")


class StreamOptions(Part):
    """What a stream tells besides text."""

    include_usage: bool = False
    include_obfuscation: bool = False
    """Ignored."""


class NamedFunction(Part):
    """The name of a tool."""

    name: str


class NamedTool(Part):
    """The tool that has to be called."""

    type: Literal["function"]
    function: NamedFunction


class NamedSchema(Part):
    """A schema of answers. They are held to it whether ``strict`` or not."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class Format(Part):
    """What an answer has to be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="before")
    @classmethod
    def _present(cls, raw: object) -> object:
        return without_null(raw)

    @model_validator(mode="after")
    def _complete(self) -> Format:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema goes with the type json_schema")
        return self


class Body(Part):
    """What both endpoints take. ``top_k`` is not OpenAI's; -1 and 0 turn it off."""

    model: str
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=1 << 31)
    max_tokens: int | None = Field(default=None, ge=1)
    stop: list[Annotated[str, Field(min_length=1, max_length=1000)]] = Field(
        default_factory=list[str], max_length=4
    )
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, raw: object) -> object:
        return [raw] if isinstance(raw, str) else raw

    @field_validator("temperature")
    @classmethod
    def _usable(cls, value: float) -> float:
        if 0 < value < LEAST_TEMPERATURE:
            raise ValueError(f"{value} is too small; expected 0 or at least {LEAST_TEMPERATURE}")
        return value

    @model_validator(mode="after")
    def _streams(self) -> Body:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream=true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wanted(self) -> int | None:
        """New tokens at most; None for what the context holds."""
        return self.max_tokens

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are wanted."""
        return False

    @property
    def alternatives(self) -> int:
        """How many of the likeliest tokens are told at each position."""
        return 0

    def sampling(self, max_tokens: int, vocab_size: int) -> Sampling:
        """Return how the tokens are drawn."""
        return Sampling(
            temperature=float(self.temperature),
            top_p=float(self.top_p),
            top_k=min(max(self.top_k, 0), vocab_size),
            max_tokens=max_tokens,
            stop=tuple(self.stop),
            seed=self.seed,
            alternatives=self.alternatives,
        )


class ChatBody(Body):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MOST_ALTERNATIVES)
    tools: Annotated[list[Tool], FailFast()] = Field(default_factory=list[Tool])
    tool_choice: str | NamedTool = "auto"
    response_format: Format = Field(default_factory=lambda: Format(type="text"))

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _known_choice(cls, raw: object) -> object:
        if raw in ("auto", "none", "required"):
            return raw
        try:
            return NamedTool.model_validate(raw)
        except ValidationError as error:
            wanted = '"auto", "none", "required" or {"type": "function", "function": {"name": …}}'
            raise ValueError(f"expected {wanted}") from error

    @property
    def wanted(self) -> int | None:
        """New tokens at most; None for what the context holds."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are wanted."""
        return self.logprobs

    @property
    def alternatives(self) -> int:
        """How many of the likeliest tokens are told at each position."""
        return self.top_logprobs

    @property
    def offered(self) -> tuple[ToolSpec, ...]:
        """The tools that the model is shown."""
        return () if self.tool_choice == "none" else tuple(t.spec() for t in self.tools)

    @property
    def forced(self) -> list[Tool] | None:
        """The tools of which one has to be called; None where an answer will do."""
        if isinstance(self.tool_choice, NamedTool):
            return [t for t in self.tools if t.function.name == self.tool_choice.function.name]
        return self.tools if self.tool_choice == "required" else None


class CompletionBody(Body):
    """``POST /v1/completions``. ``prompt`` is text or token ids, or a list of either."""

    prompt: list[str | list[int]]
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_ALTERNATIVES)

    @field_validator("prompt", mode="before")
    @classmethod
    def _listed_prompts(cls, raw: object) -> object:
        items = cast("list[object]", raw) if isinstance(raw, list) else [raw]
        if items and all(_is_id(i) for i in items):
            items = [items]
        texts = all(isinstance(i, str) for i in items)
        ids = all(isinstance(i, list) and all(map(_is_id, cast("list[object]", i))) for i in items)
        if not items or not (texts or ids):
            raise ValueError(
                "expected a string, a list of strings, a list of token ids, or a list of such lists"
            )
        return items

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are wanted."""
        return self.logprobs is not None

    @property
    def alternatives(self) -> int:
        """How many of the likeliest tokens are told at each position."""
        return self.logprobs or 0


def read(kind: type[B], data: bytes) -> B:
    """Return the body in ``data``. Raises :class:`ApiError` that names the field at fault."""
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(
            400, f"the body is not JSON: {error}. Expected an object.", code="invalid_json"
        ) from error
    if not isinstance(raw, dict):
        raise ApiError(400, f"the body is a {type(raw).__name__}. Expected an object.", code="invalid_json")
    fields = _known(kind, cast("dict[str, Any]", without_null(cast("dict[str, Any]", raw))))
    try:
        body = kind.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error) from error
    _refuse(body)
    return body


def _known(kind: type[Body], raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of ``kind``; drop the harmless ones, and refuse the others."""
    fields: dict[str, Any] = {}
    for name, value in raw.items():
        if name in kind.model_fields:
            fields[name] = value
        elif name in NEUTRAL:
            if value != NEUTRAL[name]:
                raise unsupported(name, value, f"{json.dumps(NEUTRAL[name])}, or to leave it out")
        elif name in REFUSED:
            raise unsupported(name, value, "to leave it out")
        elif name not in HARMLESS:
            near = difflib.get_close_matches(name, kind.model_fields, n=1, cutoff=0.7)
            hint = f" Did you mean {near[0]}?" if near else ""
            message = f"unknown parameter {name[:80]!r}.{hint}"
            raise ApiError(400, message, code="unknown_parameter", param=name[:80])
    return fields


def _refuse(body: Body) -> None:
    if isinstance(body, ChatBody) and body.top_logprobs and not body.logprobs:
        message = "top_logprobs goes with logprobs=true."
        raise ApiError(400, message, param="top_logprobs", code="invalid_value")
    if isinstance(body, ChatBody) and body.forced == []:
        names = ", ".join(repr(t.function.name) for t in body.tools) or "tools that it may call"
        named = isinstance(body.tool_choice, NamedTool)
        what = "names a function that is not in tools" if named else "needs tools"
        raise ApiError(400, f"tool_choice {what}. Expected {names}.", param="tool_choice", code="invalid_value")
    if isinstance(body, CompletionBody):
        asked = len(body.prompt) * body.n
        if asked > MOST_CHOICES:
            message = f"{len(body.prompt)} prompts with n={body.n} ask for {asked} completions."
            raise ApiError(400, f"{message} Expected at most {MOST_CHOICES}.", param="prompt", code="too_many")


def _invalid(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_context=False)[0]
    path = ".".join(map(str, first["loc"])) or None
    said = first["msg"].removeprefix("Value error, ")
    given = "" if first["type"] in {"missing", "value_error"} else f" (found {str(first['input'])[:80]!r})"
    more = len(error.errors()) - 1
    others = f" {more} more field{'s are' if more > 1 else ' is'} wrong." if more else ""
    return ApiError(400, f"{path or 'the body'}: {said}{given}.{others}", code="invalid_value", param=path)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
