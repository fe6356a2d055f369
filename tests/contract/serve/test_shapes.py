"""Answers of a given shape, calls held to theirs, and the likeliest tokens, as OpenAI's own client has them."""

from __future__ import annotations

import json
import math
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI

from lehr.app.serve.shapes import call_shape
from lehr.engine.native.guides import Grammars
from lehr.model.tokenizer import ByteTokenizer

from .conftest import FORK, LEFT, NAME, RIGHT, SAID, Script

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
POINT = {
    "type": "object",
    "properties": {
        "x": {"type": "integer", "minimum": 0, "maximum": 99},
        "side": {"enum": ["left", "right"]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
    },
    "required": ["x", "side", "tags"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "pattern": "^[a-c]{2}$"}},
}
SUM = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
    "required": ["a"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any, strict: bool | None = None) -> dict[str, Any]:
    function = {"name": name, "parameters": parameters} | ({} if strict is None else {"strict": strict})
    return {"type": "function", "function": function}


def format_of(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_follows_the_schema(client: OpenAI, stream: bool) -> None:
    for seed in range(3):
        made: Any = client.chat.completions.create(
            model=NAME,
            messages=HELLO,
            response_format=format_of(POINT),
            seed=seed,
            max_tokens=400,
            stream=stream,
        )
        if stream:
            chunks = list(made)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            finish = chunks[-1].choices[0].finish_reason
        else:
            text, finish = made.choices[0].message.content, made.choices[0].finish_reason
        assert finish == "stop"
        jsonschema.validate(json.loads(text), POINT)


def test_an_answer_is_an_object(client: OpenAI) -> None:
    done = client.chat.completions.create(
        model=NAME, messages=HELLO, response_format={"type": "json_object"}, n=16, seed=1, max_tokens=150
    )
    whole = [c.message.content for c in done.choices if c.finish_reason == "stop"]
    assert whole and all(isinstance(json.loads(text or ""), dict) for text in whole)
    assert all((c.message.content or "").startswith("{") for c in done.choices)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
@pytest.mark.parametrize("strict", [True, None])
def test_a_call_is_made(client: OpenAI, choice: Any, strict: bool | None) -> None:
    tools: list[Any] = [tool("add", SUM, strict), tool("put", POINT, strict)]
    seen: set[str] = set()
    for seed in range(4):
        done = client.chat.completions.create(
            model=NAME, messages=HELLO, tools=tools, tool_choice=choice, seed=seed, max_tokens=400
        )
        message = done.choices[0].message
        assert done.choices[0].finish_reason == "tool_calls" and not message.content
        (call,) = message.tool_calls or []
        assert call.type == "function"
        jsonschema.validate(json.loads(call.function.arguments), {"add": SUM, "put": POINT}[call.function.name])
        seen.add(call.function.name)
    assert seen <= ({"add", "put"} if choice == "required" else {"add"})


def test_a_call_that_the_model_makes_is_held_to_a_strict_schema(client: OpenAI) -> None:
    """The model calls ``add`` with {"a": 1} in one token; the schema has another argument."""
    other = {
        "type": "object",
        "properties": {"b": {"const": 5}},
        "required": ["b"],
        "additionalProperties": False,
    }
    done = client.chat.completions.create(
        model=NAME,
        messages=HELLO,
        tools=[tool("add", other, True)],
        temperature=0,
        max_tokens=400,
    )
    message = done.choices[0].message
    assert message.content == SAID, "what is no call is free"
    assert [json.loads(c.function.arguments) for c in message.tool_calls or []] == [{"b": 5}]


def test_a_model_that_may_answer_in_a_shape_or_call(client: OpenAI) -> None:
    kinds: set[str] = set()
    for seed in range(12):
        done = client.chat.completions.create(
            model=NAME, messages=HELLO, tools=[tool("add", SUM, True)], response_format=format_of(POINT),
            seed=seed, temperature=2, max_tokens=400,
        )  # fmt: skip
        message = done.choices[0].message
        if message.tool_calls:
            jsonschema.validate(json.loads(message.tool_calls[0].function.arguments), SUM)
        else:
            jsonschema.validate(json.loads(message.content or ""), POINT)
        kinds.add("call" if message.tool_calls else "answer")
    assert kinds == {"call", "answer"}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": format_of({"type": "objekt"})}, "response_format"),
        ({"response_format": format_of({"type": "string", "pattern": "(?=a)"})}, "response_format"),
        ({"response_format": format_of({"type": "array", "uniqueItems": True})}, "response_format"),
        ({"tools": [tool("add", {"properties": {"a": {"type": "objekt"}}}, True)]}, "tools"),
        ({"tools": [tool("add", {"not": {}}, True)], "tool_choice": "required"}, "tools"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_cannot_be_used(
    client: OpenAI, options: dict[str, Any], param: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=HELLO, stream=stream, **options)
    assert (caught.value.param, caught.value.code, caught.value.type) == (
        param,
        "invalid_schema",
        "invalid_request_error",
    )
    assert client.chat.completions.create(model=NAME, messages=HELLO).choices[0].message.content


def test_a_schema_that_is_not_strict_may_say_what_no_text_can_be_held_to(client: OpenAI) -> None:
    parameters = SUM | {"not": {"required": ["z"]}}
    done = client.chat.completions.create(
        model=NAME,
        messages=HELLO,
        tools=[tool("add", parameters)],
        tool_choice="required",
        max_tokens=200,
    )
    assert (done.choices[0].message.tool_calls or [])[0].function.name == "add"


def test_the_likeliest_tokens_of_a_chat(client: OpenAI) -> None:
    for more in ({}, {"extra_body": {"top_k": 1}}, {"temperature": 0}):
        done = client.chat.completions.create(
            model=NAME,
            messages=HELLO,
            logprobs=True,
            top_logprobs=20,
            max_tokens=4,
            **more,
        )
        assert done.choices[0].logprobs is not None
        for token in done.choices[0].logprobs.content or []:
            values = [other.logprob for other in token.top_logprobs]
            assert len(values) == 20 and values == sorted(values, reverse=True)
            assert sum(map(math.exp, values)) < 1 + 1e-6
            best = token.top_logprobs[0]
            assert (best.token, best.bytes) == (token.token, token.bytes)
            assert best.logprob == pytest.approx(token.logprob, abs=1e-4)
    chunks: Any = client.chat.completions.create(
        model=NAME, messages=HELLO, logprobs=True, top_logprobs=1, max_tokens=4, stream=True
    )
    scores = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert scores and all(len(t.top_logprobs) == 1 for t in scores)


def test_the_likeliest_tokens_of_a_completion(client: OpenAI, script: Script) -> None:
    done = client.completions.create(model=NAME, prompt=[script.ids[FORK]], max_tokens=1, logprobs=2)
    found = done.choices[0].logprobs
    assert found is not None and found.top_logprobs is not None
    assert set(found.top_logprobs[0]) == {LEFT, RIGHT}
    assert all(value == pytest.approx(math.log(0.5), abs=1e-3) for value in found.top_logprobs[0].values())


@pytest.mark.parametrize("form", ["tagged", "bare"])
def test_free_text_and_strict_calls(form: Any) -> None:
    grammars = Grammars(ByteTokenizer(), 264, {258})
    shape = call_shape([("add", SUM, True)], form, forced=False)
    field = "arguments" if form == "tagged" else "parameters"
    body = f'{{"name": "add", "{field}": {{"a": 3}}}}'
    good, bad = body, body.replace('"a"', '"b"')
    if form == "tagged":
        good, bad = (f"Let me see <b>.\n<tool_call>\n{text}\n</tool_call>" for text in (good, bad))
    for text, whole in ((good, True), (bad, False), ("plain text, {}, <tool", True), ("", True)):
        guide = grammars.guide(shape)
        assert (guide.admitted(list(text.encode())) == len(text.encode())) is whole, text
        if whole:
            guide.follow(list(text.encode()), 0)
            ends = bool(grammars.mask([(0, guide, ())]).allowed_MV[0, 258])
            assert ends, text
    if form == "tagged":
        guide = grammars.guide(shape)
        guide.follow(list(b"so <tool_call>"), 0)
        assert not grammars.mask([(0, guide, ())]).allowed_MV[0, 258], "a call that has begun is finished"
