"""What OpenAI's own client makes of the answers."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from openai import OpenAI

from .conftest import CALL, FORK, LEFT, LOOP, NAME, RIGHT, SAID, Script

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
WHOLE = SAID + "".join(CALL)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
]


def streamed(client: OpenAI, **options: Any) -> list[Any]:
    options = {"model": NAME, "messages": HELLO, "stream": True} | options
    return list(client.chat.completions.create(**options))


def text_of(chunks: list[Any], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
    return "".join(choice.delta.content or "" for choice in choices)


def test_a_chat(client: OpenAI, script: Script) -> None:
    done = client.chat.completions.create(model=NAME, messages=HELLO)
    assert done.choices[0].message.role == "assistant" and done.choices[0].message.content == WHOLE
    assert done.choices[0].finish_reason == "stop" and done.model == NAME
    assert done.usage is not None
    assert done.usage.completion_tokens == len(SAID.encode()) + len(CALL) + 1
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens


def test_a_stream_shows_whole_characters_only(client: OpenAI) -> None:
    chunks = streamed(client)
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert pieces[:5] == ["é", "€", "😀", "a", "b"] and "".join(pieces) == WHOLE
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert all(chunk.usage is None for chunk in chunks)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("ab", "é€😀"),
        ("€😀", "é"),
        (["b<tool", "zzz"], "é€😀a"),
        (["aX", "€b"], WHOLE),
        (["b", "😀a"], "é€"),
    ],
)
def test_a_stop_string_over_token_borders_is_cut_out(client: OpenAI, stop: Any, text: str) -> None:
    done = client.chat.completions.create(model=NAME, messages=HELLO, stop=stop)
    assert done.choices[0].message.content == text and done.choices[0].finish_reason == "stop"
    assert text_of(streamed(client, stop=stop)) == text


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_length_ends_it_and_half_a_character_is_replaced(client: OpenAI, name: str) -> None:
    done = client.chat.completions.create(model=NAME, messages=HELLO, **{name: 4})  # type: ignore[call-overload]
    assert done.choices[0].message.content == "é\ufffd" and done.choices[0].finish_reason == "length"
    assert done.usage.completion_tokens == 4
    assert text_of(streamed(client, **{name: 4})) == "é\ufffd"


def test_usage_is_streamed_where_it_is_asked_for(client: OpenAI) -> None:
    chunks = streamed(client, stream_options={"include_usage": True}, max_tokens=5)
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 5
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_cached_tokens_are_told(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "the very same words " * 20}]
    first, again = (client.chat.completions.create(model=NAME, messages=messages, n=2) for _ in range(2))
    assert first.usage is not None and again.usage is not None
    assert first.usage.prompt_tokens_details is not None and again.usage.prompt_tokens_details is not None
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    cached = again.usage.prompt_tokens_details.cached_tokens
    assert cached is not None and 300 < cached < again.usage.prompt_tokens < 450


def test_logprobs_belong_to_the_text(client: OpenAI) -> None:
    done = client.chat.completions.create(model=NAME, messages=HELLO, logprobs=True, stop="b<tool_call>")
    assert done.choices[0].logprobs is not None and done.choices[0].logprobs.content is not None
    tokens = done.choices[0].logprobs.content
    assert b"".join(bytes(t.bytes or []) for t in tokens).decode() == done.choices[0].message.content == "é€😀a"
    assert all(-0.01 < t.logprob <= 0 for t in tokens)
    chunks = streamed(client, logprobs=True, stop="b<tool_call>")
    scores = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [t.bytes for s in scores for t in s.content] == [t.bytes for t in tokens]
    assert all(chunk.choices[0].logprobs is None for chunk in streamed(client))


def test_logprobs_of_completions(client: OpenAI, script: Script) -> None:
    for temperature in (0, 1):
        done = client.completions.create(
            model=NAME, prompt=[script.ids[FORK]], max_tokens=2, logprobs=0, temperature=temperature, seed=3
        )
        found = done.choices[0].logprobs
        assert found is not None and found.token_logprobs is not None and found.tokens is not None
        assert found.tokens[0] in (LEFT, RIGHT) and found.tokens[1] == FORK
        assert math.isclose(found.token_logprobs[0] or 0, math.log(0.5), abs_tol=1e-3)
        assert found.text_offset == [0, len(found.tokens[0])]


def test_completions_take_text_texts_and_ids(client: OpenAI, script: Script) -> None:
    def texts(prompt: Any, **more: Any) -> list[str]:
        done = client.completions.create(model=NAME, prompt=prompt, **more)
        assert [choice.index for choice in done.choices] == list(range(len(done.choices)))
        return [choice.text for choice in done.choices]

    assert texts("well\n") == ["é€😀ab" + "".join(CALL[:5])]
    assert texts(["\n", "so a"], max_tokens=2) == ["é", "b<tool"]
    assert texts([script.ids["\n"]], max_tokens=2) == ["é"]
    assert texts([[script.ids[LOOP]], [script.ids["\n"]]], n=2, max_tokens=2) == [LOOP * 2] * 2 + ["é"] * 2
    done = client.completions.create(model=NAME, prompt=[script.ids[LOOP]])
    assert done.usage is not None and done.usage.completion_tokens == 16


def test_completions_stream(client: OpenAI, script: Script) -> None:
    prompt = [[script.ids[LOOP]], [script.ids["\n"]]]
    chunks = list(client.completions.create(model=NAME, prompt=prompt, max_tokens=9, stream=True))
    texts = ["".join(c.text for x in chunks for c in x.choices if c.index == i) for i in (0, 1)]
    assert texts == [LOOP * 9, "é€😀"]


def test_a_seed_fixes_the_draw_and_choices_differ(client: OpenAI, script: Script) -> None:
    def draw(seed: int | None, n: int = 1, **more: Any) -> list[str]:
        done = client.completions.create(
            model=NAME, prompt=[script.ids[FORK]], max_tokens=80, seed=seed, n=n, **more
        )
        return [choice.text for choice in done.choices]

    assert draw(5) == draw(5) != draw(6)
    assert draw(5, n=3) == draw(5, n=3) and len(set(draw(5, n=3))) == 3 and draw(5, n=3)[0] == draw(5)[0]
    assert draw(None) != draw(None)
    for narrow in ({"temperature": 0}, {"extra_body": {"top_k": 1}}, {"top_p": 0.3}):
        assert len(set(draw(None, n=4, **narrow))) == 1, narrow


def test_a_tool_call(client: OpenAI) -> None:
    done = client.chat.completions.create(model=NAME, messages=HELLO, tools=TOOLS)
    message = done.choices[0].message
    assert done.choices[0].finish_reason == "tool_calls" and message.content == SAID
    assert message.tool_calls is not None and len(message.tool_calls) == 1
    call: Any = message.tool_calls[0]
    assert call.function.name == "add" and json.loads(call.function.arguments) == {"a": 1}
    plain = client.chat.completions.create(model=NAME, messages=HELLO)
    assert done.usage is not None and plain.usage is not None
    assert done.usage.prompt_tokens > plain.usage.prompt_tokens + 20, "the model is shown its tools"
    answer: Any = {"role": "tool", "tool_call_id": call.id, "content": "2"}
    again = client.chat.completions.create(
        model=NAME, messages=[*HELLO, message.model_dump(), answer], tools=TOOLS
    )
    assert again.usage is not None and again.usage.prompt_tokens > done.usage.prompt_tokens + 20
    none = client.chat.completions.create(model=NAME, messages=HELLO, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content == WHOLE and none.choices[0].finish_reason == "stop"


def test_a_tool_call_in_a_stream(client: OpenAI) -> None:
    chunks = streamed(client, tools=TOOLS)
    assert text_of(chunks) == SAID
    calls = [c for chunk in chunks for c in chunk.choices[0].delta.tool_calls or []]
    assert [(c.index, c.function.name, c.function.arguments) for c in calls] == [(0, "add", '{"a": 1}')]
    assert calls[0].id and chunks[-1].choices[0].finish_reason == "tool_calls"


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "lehr"
