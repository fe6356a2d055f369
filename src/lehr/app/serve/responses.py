"""Completions as OpenAI's clients read them, whole and in chunks."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from lehr.app.serve.requests import Body, ChatBody
from lehr.app.serve.text import Scored
from lehr.app.serve.tools import Call
from lehr.app.serve.work import Delta, Usage

DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def shape_for(body: Body, model: str, request_id: str) -> Chat | Text:
    """Return the writer for the endpoint that ``body`` belongs to."""
    return (Chat if isinstance(body, ChatBody) else Text)(body, model, request_id)


class _Shape(ABC):
    whole_object = chunk_object = prefix = ""

    def __init__(self, body: Body, model: str, request_id: str) -> None:
        self._body = body
        self._head = {"id": f"{self.prefix}-{request_id}", "created": int(time.time()), "model": model}
        self._calls: dict[int, int] = defaultdict(int)

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Return one chunk of a stream."""
        return self._chunk([self._change(delta)])

    def usage_chunk(self, usage: Usage) -> dict[str, Any]:
        """Return the chunk that ends a stream whose counts were asked for."""
        return self._chunk([]) | {"usage": counts(usage)}

    def whole(self, deltas: Iterable[Delta], usage: Usage) -> dict[str, Any]:
        """Return the answer that is not streamed."""
        gained: dict[int, list[Delta]] = defaultdict(list)
        for delta in deltas:
            gained[delta.index].append(delta)
        choices = [self._choice(index, gained[index]) for index in sorted(gained)]
        return self._head | {"object": self.whole_object, "choices": choices, "usage": counts(usage)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        more = {"usage": None} if self._body.include_usage else {}
        return self._head | {"object": self.chunk_object, "choices": choices} | more

    @abstractmethod
    def _change(self, delta: Delta) -> dict[str, Any]: ...

    @abstractmethod
    def _choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]: ...

    @abstractmethod
    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the chunk that a choice begins with, if there is one."""

    def _call(self, index: int, call: Call) -> dict[str, Any]:
        number = self._calls[index]
        self._calls[index] += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {
            "index": number,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": function,
        }


class Chat(_Shape):
    """``chat.completion``."""

    whole_object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the chunk that names the speaker."""
        said = {"role": "assistant", "content": ""}
        return self._chunk([{"index": index, "delta": said, "logprobs": None, "finish_reason": None}])

    def _change(self, delta: Delta) -> dict[str, Any]:
        said: dict[str, Any] = {"content": delta.text} if delta.text else {}
        if delta.calls:
            said["tool_calls"] = [self._call(delta.index, call) for call in delta.calls]
        scores = self._scores(delta.tokens) if delta.tokens else None
        return {"index": delta.index, "delta": said, "logprobs": scores, "finish_reason": delta.finish}

    def _choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        calls = [self._call(index, call) for delta in deltas for call in delta.calls]
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [_without_index(call) for call in calls]}
        tokens = [token for delta in deltas for token in delta.tokens]
        scores = self._scores(tokens) if self._body.scored else None
        return {"index": index, "message": message, "logprobs": scores, "finish_reason": deltas[-1].finish}

    def _scores(self, tokens: Iterable[Scored]) -> dict[str, Any]:
        content = [_score(t) | {"top_logprobs": [_score(other) for other in t.others]} for t in tokens]
        return {"content": content, "refusal": None}


class Text(_Shape):
    """``text_completion``."""

    whole_object = chunk_object = "text_completion"
    prefix = "cmpl"

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return None: there is no speaker to name."""
        return None

    def _change(self, delta: Delta) -> dict[str, Any]:
        return self._choice(delta.index, [delta])

    def _choice(self, index: int, deltas: Sequence[Delta]) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas)
        tokens = [token for delta in deltas for token in delta.tokens]
        scores = _legacy(tokens) if self._body.scored else None
        return {"index": index, "text": text, "logprobs": scores, "finish_reason": deltas[-1].finish}


def counts(usage: Usage) -> dict[str, Any]:
    """Return the counts of tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _score(token: Scored) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.data)}


def _legacy(tokens: Sequence[Scored]) -> dict[str, Any]:
    others = any(t.others for t in tokens)
    return {
        "tokens": [t.text for t in tokens],
        "token_logprobs": [t.logprob for t in tokens],
        "top_logprobs": [{o.text: o.logprob for o in t.others} for t in tokens] if others else None,
        "text_offset": [t.offset for t in tokens],
    }


def _without_index(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "index"}
