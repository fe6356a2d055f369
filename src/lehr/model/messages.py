"""Chat messages and tools in the form of OpenAI's API: what clients send, and how training data is written."""

from __future__ import annotations

import json
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from lehr.core.task import Message, ToolSpec
from lehr.model.chat import CallForm

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def written(name: str, arguments: str, form: CallForm = "tagged") -> str:
    """Return a call as a model writes it, for the history of a conversation. ``arguments`` is JSON text."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        value = arguments
    if form == "bare":
        return json.dumps({"name": name, "parameters": value}, ensure_ascii=False)
    body = json.dumps({"name": name, "arguments": value}, ensure_ascii=False)
    return f"{OPEN}\n{body}\n{CLOSE}"


class Part(BaseModel):
    """A part of a body: strict, and without unknown keys."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class CalledFunction(Part):
    """A tool call of an earlier turn."""

    name: str
    arguments: str = "{}"


class ToolCall(Part):
    """A tool call of an earlier turn, with its id."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Part):
    """One message. ``content`` is text, or a list of text parts, which are joined."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    tool_calls: list[ToolCall] = Field(default_factory=list[ToolCall])
    tool_call_id: str | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] = Field(default_factory=list[Any])

    @model_validator(mode="before")
    @classmethod
    def _present(cls, raw: object) -> object:
        return without_null(raw)

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, raw: object) -> object:
        if not isinstance(raw, list):
            return raw
        texts: list[str] = []
        for part in cast("list[object]", raw):
            fields = cast("dict[str, object]", part if isinstance(part, dict) else {})
            text = fields.get("text")
            if fields.get("type") != "text" or not isinstance(text, str):
                kind = fields.get("type")
                raise ValueError(f"a part of type {kind!r} cannot be shown to this model; expected text parts")
            texts.append(text)
        return "".join(texts)

    @model_validator(mode="after")
    def _complete(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls of the role {self.role!r}; only the assistant calls tools")
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise ValueError("content is missing")
        return self

    def message(self, form: CallForm = "tagged") -> Message:
        """Return it as the chat template takes it; tool calls are written out as the model writes them."""
        text = self.content if self.content is not None else self.refusal or ""
        calls = [written(c.function.name, c.function.arguments, form) for c in self.tool_calls]
        content = "\n".join([*([text] if text else []), *calls])
        role = "system" if self.role == "developer" else self.role
        return Message(role=role, content=content)


class FunctionSpec(Part):
    """A tool that the model may call."""

    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Whether the arguments are held to every keyword of ``parameters``."""


class Tool(Part):
    """A tool of the kind that exists: a function."""

    type: Literal["function"]
    function: FunctionSpec

    def spec(self) -> ToolSpec:
        """Return it as the chat template takes it."""
        f = self.function
        return ToolSpec(name=f.name, description=f.description or "", parameters=f.parameters or {})


def without_null(raw: object) -> object:
    """Return an object without the keys whose value is null; anything else as it is."""
    if not isinstance(raw, dict):
        return raw
    return {name: value for name, value in cast("dict[str, Any]", raw).items() if value is not None}
