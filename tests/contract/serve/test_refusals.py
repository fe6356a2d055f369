"""What is refused, and how OpenAI's own client tells of it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import openai
import pytest
from openai import OpenAI

from .conftest import NAME, Running

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("options", "param", "code"),
    [
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
        ({"presence_penalty": -1}, "presence_penalty", "unsupported_parameter"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "invalid_value"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "invalid_value"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "unsupported_parameter"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "sometimes"}, "tool_choice", "invalid_value"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "add"}}},
            "tool_choice",
            "invalid_value",
        ),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
        ({"extra_body": {"best_of": 2}}, "best_of", "unsupported_parameter"),
        ({"extra_body": {"echo": True}}, "echo", "unsupported_parameter"),
        ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter"),
        ({"temperature": 2.5}, "temperature", "invalid_value"),
        ({"temperature": 1e-300}, "temperature", "invalid_value"),
        ({"temperature": "1"}, "temperature", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"extra_body": {"top_k": 1 << 70}}, "top_k", "invalid_value"),
        ({"n": 0}, "n", "invalid_value"),
        ({"n": 1000}, "n", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": True}, "max_tokens", "invalid_value"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value"),
        ({"stop": [""]}, "stop.0", "invalid_value"),
        ({"seed": 1 << 70}, "seed", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": [{"role": "friend", "content": "x"}]}, "messages.0.role", "invalid_value"),
        ({"messages": [{"role": "user"}]}, "messages.0", "invalid_value"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content",
            "invalid_value",
        ),
        ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "invalid_value"),
        ({"max_tokens": 1 << 15}, "messages", "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * 40000}]}, "messages", "context_length_exceeded"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_done_is_refused_by_name(
    client: OpenAI, options: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": NAME, "messages": HELLO} | options)
    assert (caught.value.param, caught.value.code) == (param, code)
    assert caught.value.type == "invalid_request_error"
    field = param.split(".")[0]
    assert field in caught.value.message or code == "context_length_exceeded"


def test_what_asks_for_nothing_is_accepted(client: OpenAI) -> None:
    done = client.chat.completions.create(
        model=NAME,
        messages=HELLO,
        frequency_penalty=0,
        presence_penalty=0.0,
        logit_bias={},
        top_logprobs=0,
        response_format={"type": "text"},
        parallel_tool_calls=True,
        user="somebody",
        metadata={"a": "b"},
        store=False,
        stop=None,
        seed=None,
        max_tokens=2,
        extra_body={"best_of": 1, "echo": False},
    )
    assert done.choices[0].message.content == "é"


@pytest.mark.parametrize(
    ("prompt", "more", "code"),
    [
        ("", {}, "invalid_value"),
        ([], {}, "invalid_value"),
        ([5, -1], {}, "invalid_value"),
        ([5, 100_000], {}, "invalid_value"),
        (["a", 5], {}, "invalid_value"),
        (["a"] * 100, {"n": 2}, "too_many"),
        ([5] * 40_000, {}, "context_length_exceeded"),
    ],
)
def test_prompts_that_are_none(client: OpenAI, prompt: Any, more: dict[str, Any], code: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=NAME, prompt=prompt, **more)
    assert caught.value.code == code and (caught.value.param or "").startswith("prompt")


@pytest.mark.parametrize("token", ["wrong", "a-token-of-the-test", "a-token-of-the-testsé", ""])
def test_a_wrong_token(server: Running, token: str) -> None:
    status, body = ask(server, "/v1/models", token=token)
    assert status == 401 and body["error"]["code"] == "invalid_api_key"
    assert ask(server, "/metrics", token=token)[0] == 401
    assert ask(server, "/health", token=token) == (200, {"status": "ok"})
    if token.isascii() and token:
        with pytest.raises(openai.AuthenticationError):
            server.client(api_key=token).models.list()


def test_an_unknown_model(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="other", messages=HELLO)
    assert caught.value.code == "model_not_found" and "'other'" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("path", "data", "status", "code"),
    [
        ("/v1/chat/completions", b"{", 400, "invalid_json"),
        ("/v1/chat/completions", b"[]", 400, "invalid_json"),
        ("/v1/chat/completions", b'{"model": "\\ud800"}', 400, "invalid_json"),
        ("/v1/chat/completions", b"[" * 100_000, 400, "invalid_json"),
        ("/v1/chat/completions", b'{"model": "scripted", "temperature": NaN}', 400, "invalid_json"),
        ("/v1/chat/completions", b" " * (9 << 20), 413, "body_too_large"),
        ("/v1/embeddings", b"{}", 404, "not_found"),
        ("/v1/models", b"{}", 405, "method_not_allowed"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bodies_and_paths(server: Running, path: str, data: bytes, status: int, code: str) -> None:
    found, body = ask(server, path, data)
    assert found == status and body["error"]["code"] == code
    assert set(body["error"]) == {"message", "type", "param", "code"}


def ask(server: Running, path: str, data: bytes | None = None, token: str | None = None) -> tuple[int, Any]:
    given = server.token if token is None else token
    headers = (
        {"Authorization": f"Bearer {given}".encode("latin-1", "replace").decode("latin-1")} if given else {}
    )
    request = urllib.request.Request(f"{server.address}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
            return answer.status, json.loads(text) if text.startswith(b"{") else text
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())
