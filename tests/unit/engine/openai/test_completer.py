"""Asking a model behind an API: what is retried, what is not, how long, how fast, and what is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_api import (
    Act,
    FakeApi,
    cuts,
    fake_api,
    hangs_up,
    never,
    refuses,
    says,
    sends,
)

from lehr.core.completer import AnswerError, NoAccess
from lehr.core.config import resolve
from lehr.core.errors import ConfigError, DeadlineExceeded
from lehr.core.task import Message
from lehr.core.trace import Sampling
from lehr.engine.openai.completer import OpenAICompleter
from lehr.engine.openai.settings import OpenAIConfig

KEY = "sk-this-is-the-secret-key"
HELLO = [Message(role="system", content="Be brief."), Message(role="user", content="Hello?")]
GREEDY = Sampling(temperature=0.0, max_tokens=5)


def asking(
    what: Callable[[FakeApi, OpenAICompleter], Awaitable[None]], *acts: Act, key: str = KEY, **settings: Any
) -> None:
    async def go() -> None:
        async with fake_api(*acts) as api:
            config = OpenAIConfig(model="m", base_url=api.address, backoff_s=0.01, **settings)
            completer = OpenAICompleter(config, environ={"LEHR_API_KEY": key})
            try:
                await what(api, completer)
            finally:
                await completer.close()

    asyncio.run(asyncio.wait_for(go(), 30))


def test_a_request_says_what_was_asked_and_an_answer_what_was_said() -> None:
    async def what(api: FakeApi, completer: OpenAICompleter) -> None:
        sampling = Sampling(temperature=0.5, top_p=0.9, top_k=3, max_tokens=5, stop=("END",), seed=8)
        said = [*HELLO, Message(role="assistant", content="ls"), Message(role="tool", content="a.txt")]
        answer = await completer.complete(said, sampling)
        assert (answer.text, answer.stop, answer.attempts, answer.model) == (
            "hello",
            "length",
            1,
            "the-model-itself",
        )
        usage = answer.usage
        assert (usage.prompt_tokens, usage.cached_tokens, usage.own_tokens) == (7, 2, 3)
        assert answer.cost == pytest.approx((5 * 2 + 2 * 0.5 + 3 * 8) / 1e6)
        assert api.headers[0]["authorization"] == f"Bearer {KEY}"
        assert api.bodies[0] == {
            "model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": 3,
            "stop": ["END"], "seed": 8,
            "messages": [
                {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"},
                {"role": "assistant", "content": "ls"}, {"role": "user", "content": "a.txt"},
            ],
            "reasoning_effort": "low",
        }  # fmt: skip
        spent = completer.spent
        assert (spent.answers, spent.attempts, spent.prompt_tokens, spent.cached_tokens) == (1, 1, 7, 2)
        assert spent.completion_tokens == 3 and spent.cost == answer.cost and "cost 0.0000" in spent.summary()

    asking(
        what, says(finish="length"), extra={"reasoning_effort": "low"},
        prices={"prompt": 2, "cached": 0.5, "completion": 8},
    )  # fmt: skip


def test_options_that_a_model_refuses_are_left_out() -> None:
    async def what(api: FakeApi, completer: OpenAICompleter) -> None:
        answer = await completer.complete(HELLO, GREEDY)
        assert set(api.bodies[0]) == {"model", "messages", "max_completion_tokens"}
        assert answer.stop == "filtered" and answer.cost is None
        assert completer.spent.unmetered == 1 and completer.spent.cost is None

    asking(
        what, says(finish="content_filter", usage=None), leave_out=("temperature", "seed"),
        length_field="max_completion_tokens",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("act", "kind"),
    [
        (refuses(429), "429"),
        (refuses(500), "500"),
        (refuses(503, "busy"), "503"),
        (refuses(529), "529"),
        (refuses(418, "tea", "x-should-retry: true"), "418"),
        (sends(b"<html>Bad gateway</html>", 502), "502"),
        (sends(b"<html>hello</html>"), "no chat completion"),
        (sends(b'{"choices": []}'), "no chat completion"),
        (sends(b'{"choices": [{"message": 7}]}'), "no chat completion"),
        (sends(b"\xff\xfe\x00"), "no chat completion"),
        (sends(b""), "no chat completion"),
        (cuts, "connection failed"),
        (hangs_up, "connection failed"),
        (never, "too slow"),
    ],
)
def test_what_may_pass_is_asked_again(act: Act, kind: str) -> None:
    async def what(api: FakeApi, completer: OpenAICompleter) -> None:
        answer = await completer.complete(HELLO, GREEDY)
        assert answer.text == "hello" and answer.attempts == 3 and len(api.bodies) == 3
        assert completer.spent.failures == {kind: 2}

    asking(what, act, act, says(), attempt_timeout_s=0.3)


@pytest.mark.parametrize(
    ("act", "error", "told"),
    [
        (refuses(401, "bad key"), NoAccess, "status 401: bad key. Check the key in LEHR_API_KEY"),
        (refuses(403), NoAccess, "Check the key"),
        (refuses(404, "no such model"), NoAccess, "Check the model's name and the address"),
        (refuses(429, "pay", code="insufficient_quota"), NoAccess, "credit and limits"),
        (
            refuses(400, "no seed", code="unsupported_parameter"),
            AnswerError,
            "no seed. Name the option in leave_out",
        ),
        (refuses(400, "long", code="context_length_exceeded"), AnswerError, "Shorten the conversation"),
        (refuses(503, "going", "x-should-retry: false"), AnswerError, "status 503: going"),
        (sends(b"plain words", 422), AnswerError, "status 422: plain words"),
    ],
)
def test_what_will_not_pass_is_told_at_once(act: Act, error: type[AnswerError], told: str) -> None:
    async def what(api: FakeApi, completer: OpenAICompleter) -> None:
        with pytest.raises(error) as found:
            await completer.complete(HELLO, GREEDY)
        assert told in str(found.value) and f"m at {api.address}" in str(found.value)
        assert isinstance(found.value, NoAccess) == (error is NoAccess)
        assert len(api.bodies) == 1 and found.value.status == int(next(iter(completer.spent.failures)))

    asking(what, act)


def test_retries_end() -> None:
    async def what(api: FakeApi, completer: OpenAICompleter) -> None:
        with pytest.raises(AnswerError, match=r"after 3 attempts: status 429: slow down.*requests_per_minute"):
            await completer.complete(HELLO, GREEDY)
        assert len(api.bodies) == 3

    asking(what, refuses(429, "slow down"), retries=2)


def test_nobody_listens() -> None:
    async def go() -> None:
        config = OpenAIConfig(model="m", base_url="http://127.0.0.1:9/v1", retries=1, backoff_s=0.01)
        completer = OpenAICompleter(config, environ={})
        with pytest.raises(
            AnswerError, match=r"after 2 attempts: connection failed.*See whether the server runs"
        ):
            await completer.complete(HELLO, GREEDY)
        await completer.close()

    asyncio.run(asyncio.wait_for(go(), 30))


def test_retry_after_holds_everybody_and_is_not_shortened() -> None:
    async def what(api: FakeApi, completer: OpenAICompleter) -> None:
        first = asyncio.create_task(completer.complete(HELLO, GREEDY))
        while not completer.spent.failures:
            await asyncio.sleep(0.005)
        await completer.complete(HELLO, GREEDY)
        await first
        assert len(api.times) == 3 and min(api.times[1:]) - api.times[0] >= 0.4

    asking(what, refuses(429, "later", "retry-after-ms: 400"), says())


def test_a_retry_after_beyond_the_deadline_is_not_waited_for() -> None:
    async def what(api: FakeApi, completer: OpenAICompleter) -> None:
        with pytest.raises(AnswerError, match=r"the next attempt may be made in 3\d\d\d s, and"):
            await completer.complete(HELLO, GREEDY, timeout_s=20)

    asking(what, refuses(503, "back soon", "retry-after: 3600"))


def test_the_deadline_is_for_everything() -> None:
    async def what(api: FakeApi, completer: OpenAICompleter) -> None:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        with pytest.raises(DeadlineExceeded, match=r"within 0.5 s, in \d+ failed attempts; the last.*too slow"):
            await completer.complete(HELLO, GREEDY, timeout_s=0.5)
        assert loop.time() - begun < 2 and len(api.bodies) >= 2

    asking(what, never, attempt_timeout_s=0.15, retries=50)


def test_a_cancelled_caller_ends_the_request_and_frees_its_place() -> None:
    async def what(api: FakeApi, completer: OpenAICompleter) -> None:
        task = asyncio.create_task(completer.complete(HELLO, GREEDY))
        while not api.bodies:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(api.gone.wait(), 5)
        assert (await completer.complete(HELLO, GREEDY)).text == "hello"

    asking(what, never, says(), concurrency=1)


def test_concurrency_is_bounded_and_used() -> None:
    async def what(api: FakeApi, completer: OpenAICompleter) -> None:
        await asyncio.gather(*(completer.complete(HELLO, GREEDY) for _ in range(9)))
        assert api.most == 3 and len(api.bodies) == 9

    asking(what, says(after_s=0.1), concurrency=3)


def test_the_key_is_told_to_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    async def what(api: FakeApi, completer: OpenAICompleter) -> None:
        with pytest.raises(NoAccess) as found:
            await completer.complete(HELLO, GREEDY)
        shown = [str(found.value), repr(completer), repr(found.value), str(completer.config.model_dump())]
        assert all(KEY not in text for text in shown) and "key *** is wrong" in shown[0]
        assert KEY not in str(completer.spent)

    with caplog.at_level(logging.DEBUG):
        asking(what, refuses(500, KEY), sends(f"<html>{KEY}".encode()), refuses(401, f"the key {KEY} is wrong"))
    assert "again in" in caplog.text and KEY not in caplog.text


def test_keys_go_where_they_belong(caplog: pytest.LogCaptureFixture) -> None:
    everything = {"OPENAI_API_KEY": "sk-openai", "OTHER": "sk-other"}
    with pytest.raises(ConfigError, match=r"(?s)no key for m.*OPENAI_API_KEY.*export"):
        OpenAICompleter(OpenAIConfig(model="m"), environ={"LEHR_API_KEY": "x"})

    async def what(api: FakeApi, completer: OpenAICompleter) -> None:
        elsewhere = OpenAICompleter(completer.config, environ=everything)
        await elsewhere.complete(HELLO, GREEDY)
        named = OpenAICompleter(completer.config.model_copy(update={"key_env": "OTHER"}), environ=everything)
        await named.complete(HELLO, GREEDY)
        assert "authorization" not in api.headers[0]
        assert api.headers[1]["authorization"] == "Bearer sk-other"
        await elsewhere.close()
        await named.close()

    asking(what, says(), key="")
    assert "unencrypted" not in caplog.text
    OpenAICompleter(OpenAIConfig(model="m", base_url="http://example.test/v1"), environ={"LEHR_API_KEY": KEY})
    assert (
        "LEHR_API_KEY is sent unencrypted to http://example.test/v1" in caplog.text and KEY not in caplog.text
    )


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("base_url=ftp://x", "expected http:// or https://"),
        ("base_url=http://user:secret@x/v1", "no password"),
        ("base_url=http://x/v1?key=1", "no password, query"),
        ("concurency=3", "did you mean 'concurrency'"),
        ("concurrency=0", "concurrency"),
        ("extra.stream=true", "stream cannot be set here"),
        ("leave_out=['n']", "leave_out"),
        ("key_env='sk-looks-like-a-key'", "key_env"),
    ],
)
def test_settings_that_cannot_be_used(override: str, told: str) -> None:
    with pytest.raises(ConfigError) as found:
        resolve(OpenAIConfig, {"model": "m"}, [override])
    assert told in str(found.value) and "secret" not in str(found.value)


def test_a_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(__import__("sys").modules, "openai", None)
    with pytest.raises(ImportError, match=r"pip install 'lehr\[openai\]'"):
        OpenAICompleter(OpenAIConfig(model="m", base_url="http://127.0.0.1:9"), environ={})
