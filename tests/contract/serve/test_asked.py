"""The completer against a real server: what it is told, refused and billed, and a measurement through it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lehr.core.completer import AnswerError, NoAccess
from lehr.core.task import Message
from lehr.core.trace import Sampling
from lehr.engine.openai.completer import OpenAICompleter
from lehr.engine.openai.settings import OpenAIConfig
from lehr.pipeline.evaluate import evaluate_model
from lehr.pipeline.observer import Silent

ASKED = [Message(role="user", content="Hi")]
GREEDY = Sampling(temperature=0.0, max_tokens=64)
SAID, TOKEN, NAME = "é€😀ab", "a-token-of-the-tests", "scripted"


def asking(server: Any, what: Callable[[OpenAICompleter], Awaitable[None]], **settings: Any) -> None:
    async def go() -> None:
        environ = {"LEHR_API_KEY": settings.pop("key", TOKEN)}
        config = OpenAIConfig(**{"model": NAME, "base_url": f"{server.address}/v1"} | settings)
        completer = OpenAICompleter(config, environ=environ)
        try:
            await what(completer)
        finally:
            await completer.close()

    asyncio.run(asyncio.wait_for(go(), 60))


def test_an_answer_with_its_usage(server: Any) -> None:
    async def what(completer: OpenAICompleter) -> None:
        answers = await asyncio.gather(*(completer.complete(ASKED, GREEDY) for _ in range(12)))
        assert all(answer.text.startswith(SAID) and answer.stop == "stop" for answer in answers)
        assert {answer.model for answer in answers} == {NAME}
        assert completer.spent.answers == 12 and not completer.spent.failures
        usage = answers[0].usage
        assert usage.prompt_tokens > 5 and usage.own_tokens > 5
        cut = await completer.complete(ASKED, Sampling(temperature=0, max_tokens=3))
        assert cut.stop == "length" and cut.usage.own_tokens == 3
        again = [await completer.complete(ASKED, Sampling(max_tokens=9, top_k=5, seed=3)) for _ in range(2)]
        assert again[0].text == again[1].text

    asking(server, what)


def test_refusals_say_what_to_do(server: Any) -> None:
    async def unknown(completer: OpenAICompleter) -> None:
        with pytest.raises(NoAccess, match=r"status 404: the model 'other' is not served.*model's name"):
            await completer.complete(ASKED, GREEDY)

    async def stranger(completer: OpenAICompleter) -> None:
        with pytest.raises(NoAccess, match=r"status 401: .*Check the key in LEHR_API_KEY"):
            await completer.complete(ASKED, GREEDY)

    async def keyless(completer: OpenAICompleter) -> None:
        with pytest.raises(
            NoAccess, match=r"status 401: .*Put the key into the environment variable LEHR_API_KEY"
        ):
            await completer.complete(ASKED, GREEDY)

    async def long(completer: OpenAICompleter) -> None:
        with pytest.raises(AnswerError, match=r"status 400: .*do not fit the context.*Shorten"):
            await completer.complete(ASKED, Sampling(temperature=0, max_tokens=1 << 20))
        assert completer.spent.attempts == 1

    async def strange(completer: OpenAICompleter) -> None:
        with pytest.raises(AnswerError, match=r"status 400: .*logit_bias"):
            await completer.complete(ASKED, GREEDY)

    asking(server, unknown, model="other")
    asking(server, stranger, key="wrong")
    asking(server, keyless, key="")
    asking(server, long)
    asking(server, strange, extra={"logit_bias": {"1": 5}})


def test_a_model_behind_an_api_is_measured(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEHR_API_KEY", TOKEN)
    notes: list[str] = []

    class Notes(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    name = f"openai:{NAME}@{server.address}/v1"
    rows = evaluate_model(name, ["reasoning/gcd"], count=3, observer=Notes())
    assert [(row.domain, row.n, row.invalid) for row in rows] == [("reasoning/gcd", 3, 0)]
    assert any("3 answers in 3 requests" in note for note in notes)
    other = f"openai:other@{server.address}/v1"
    with pytest.raises(ExceptionGroup) as found:
        evaluate_model(other, ["reasoning/gcd"], count=3, api=["concurrency=1"])
    assert found.group_contains(NoAccess, match="is not served")
