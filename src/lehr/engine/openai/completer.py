"""Asks a model behind an OpenAI-compatible API, patiently and within limits."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from lehr.core.completer import Answer, AnswerError, AnswerStop
from lehr.core.errors import ConfigError, DeadlineExceeded, MissingDependency
from lehr.core.task import Message
from lehr.core.trace import Sampling, Usage
from lehr.engine.openai.pace import Pace
from lehr.engine.openai.refusals import Refusal, error_of, of_status
from lehr.engine.openai.settings import OpenAIConfig
from lehr.engine.openai.spent import Spent, cost_of

LONGEST_BACKOFF_S = 60.0
CHARACTERS_PER_TOKEN = 4
"""For the estimate that counts against tokens per minute until the server has said how many there were."""

log = logging.getLogger("lehr.engine.openai")


class _Details(BaseModel):
    cached_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(default=0, ge=0)
    prompt_tokens_details: _Details | None = None


class _Said(BaseModel):
    content: str | None = None
    refusal: str | None = None


class _Choice(BaseModel):
    message: _Said
    finish_reason: str | None = None


class _Reply(BaseModel):
    """The part of a chat completion that is read."""

    choices: list[_Choice] = Field(min_length=1)
    model: str = ""
    usage: _Usage | None = None


class _Failed(Exception):
    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal


class OpenAICompleter:
    """Implements ``core.completer.Completer``. Ready when built; :meth:`close` ends its connections.

    The key is read from the environment once. It is in no log line, no error and no record. ``spent`` counts
    what was asked.
    """

    def __init__(
        self,
        config: OpenAIConfig,
        *,
        environ: Mapping[str, str] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        key = (os.environ if environ is None else environ).get(config.key_variable, "").strip()
        if not key and config.is_default_host:
            raise ConfigError(
                f"there is no key for {config.model} at {config.base_url}",
                expected=f"it in the environment variable {config.key_variable}",
                hint=f"Type `export {config.key_variable}=…`, or name another address with {config.model}@http://…",
            )
        if key and not config.is_private:
            log.warning("the key in %s is sent unencrypted to %s", config.key_variable, config.base_url)
        self.config = config
        self.spent = Spent()
        self._key = key
        self._sleep = sleep
        self._openai = _require_openai()
        self._client: Any = self._openai.AsyncOpenAI(
            api_key=key or "none",
            base_url=config.base_url,
            max_retries=0,
            timeout=config.attempt_timeout_s,
        )
        self._gate = asyncio.Semaphore(config.concurrency)
        self._pace = Pace(config.requests_per_minute, config.tokens_per_minute)
        self._jitter = random.Random()

    def __repr__(self) -> str:
        return f"OpenAICompleter({self.config.model!r} at {self.config.base_url!r})"

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, *, timeout_s: float | None = None
    ) -> Answer:
        """Return the model's next turn. What may pass is tried again; see ``core.completer.Completer``."""
        limit_s = self.config.timeout_s if timeout_s is None else timeout_s
        body = self._body(messages, sampling)
        estimate = sum(len(m.content) for m in messages) / CHARACTERS_PER_TOKEN + sampling.max_tokens
        begun = time.monotonic()
        failed: list[Refusal] = []
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    try:
                        reply = await self._attempt(body, estimate)
                        break
                    except _Failed as failure:
                        failed.append(failure.refusal)
                    await self._wait_to_retry(failed, begun + limit_s)
        except TimeoutError as error:
            last = f"; the last failure was {failed[-1]}" if failed else ""
            raise DeadlineExceeded(
                f"{self.config.model} at {self.config.base_url} gave no answer within {limit_s:g} s, in"
                f" {len(failed)} failed attempts{last}",
                hint="Raise timeout_s, or lower the concurrency where requests wait for their turn.",
            ) from error
        return self._answer(reply, estimate, time.monotonic() - begun, len(failed) + 1)

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._client.close()

    def _body(self, messages: Sequence[Message], sampling: Sampling) -> dict[str, Any]:
        if not messages:
            raise AnswerError("there is nothing to answer", expected="at least one message")
        options: dict[str, Any] = {"temperature": sampling.temperature}
        options |= {"top_p": sampling.top_p} if sampling.top_p != 1 else {}
        options |= {"stop": list(sampling.stop)} if sampling.stop else {}
        options |= {"seed": sampling.seed} if sampling.seed is not None else {}
        for name in self.config.leave_out:
            options.pop(name, None)
        more = dict(self.config.extra) | ({"top_k": sampling.top_k} if sampling.top_k else {})
        return {
            "model": self.config.model,
            "messages": [_sent(m) for m in messages],
            self.config.limit_name: sampling.max_tokens,
            **options,
            "extra_body": more or None,
            "extra_headers": None if self._key else {"Authorization": self._openai.Omit()},
        }

    async def _attempt(self, body: Mapping[str, Any], estimate: float) -> _Reply:
        """Send one request in its turn. Raises :class:`_Failed`."""
        async with self._gate:
            await self._pace.admit(estimate)
            self.spent.attempts += 1
            try:
                return await self._ask(body)
            except _Failed as failure:
                refusal = failure.refusal
                self.spent.failures[refusal.kind] += 1
                self._pace.correct(estimate, 0)
                if refusal.status == 429 and refusal.passing and refusal.retry_after_s:
                    self._pace.hold(min(refusal.retry_after_s, LONGEST_BACKOFF_S))
                raise

    async def _ask(self, body: Mapping[str, Any]) -> _Reply:
        openai = self._openai
        try:
            async with asyncio.timeout(self.config.attempt_timeout_s):
                raw = await self._client.chat.completions.with_raw_response.create(**body)
                text: str = raw.text
        except openai.APIStatusError as error:
            answer = error.response
            raise _Failed(of_status(answer.status_code, answer.headers, self._hidden(answer.text))) from None
        except (TimeoutError, openai.APITimeoutError):
            late = f"no answer within {self.config.attempt_timeout_s:g} s"
            raise _Failed(Refusal("too slow", late, passing=True)) from None
        except openai.APIConnectionError as error:
            cause = error.__cause__ or error
            told = self._hidden(str(cause) or type(cause).__name__)
            raise _Failed(Refusal("connection failed", told, passing=True)) from None
        try:
            return _Reply.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            told = self._hidden(f"{place + ': ' if place else ''}{first['msg']}; it begins {text[:80]!r}")
            raise _Failed(Refusal("no chat completion", told, passing=True)) from None

    async def _wait_to_retry(self, failed: Sequence[Refusal], ends: float) -> None:
        """Sleep before the next attempt. Raises the error of the last one where there is to be none."""
        last, number = failed[-1], len(failed)
        if not last.passing or number > self.config.retries:
            raise error_of(last, self.config, number, has_key=bool(self._key))
        backoff = min(LONGEST_BACKOFF_S, self.config.backoff_s * 2 ** (number - 1))
        wait = backoff * self._jitter.uniform(0.5, 1.0)
        if last.retry_after_s is not None:
            wait = max(wait, last.retry_after_s + self.config.backoff_s * self._jitter.uniform(0.0, 0.5))
        left = ends - time.monotonic()
        if last.retry_after_s is not None and wait > left:
            error = error_of(last, self.config, number, has_key=bool(self._key))
            error.what += f"; the next attempt may be made in {wait:.0f} s, and {max(0.0, left):.0f} s are left"
            raise error
        log.info("%s: %s; again in %.1f s", self.config.model, last, wait)
        await self._sleep(wait)

    def _answer(self, reply: _Reply, estimate: float, seconds: float, attempts: int) -> Answer:
        choice = reply.choices[0]
        usage = Usage()
        if reply.usage is None:
            self.spent.unmetered += 1
        else:
            told = reply.usage
            details = told.prompt_tokens_details
            cached = (details.cached_tokens or 0) if details else 0
            usage = Usage(told.prompt_tokens, min(cached, told.prompt_tokens), told.completion_tokens)
            self._pace.correct(estimate, usage.prompt_tokens + usage.own_tokens)
        cost = cost_of(usage, self.config.prices) if reply.usage else None
        self.spent.add(usage, cost)
        text = choice.message.content if choice.message.content is not None else choice.message.refusal or ""
        return Answer(text, _stop(choice.finish_reason), usage, cost, seconds, attempts, reply.model)

    def _hidden(self, text: str) -> str:
        """Return ``text`` without the key, should a server repeat it."""
        return text.replace(self._key, "***") if self._key else text


def _sent(message: Message) -> dict[str, str]:
    """Return a message as the API takes it. What an environment answered is said by the user: the API knows
    tools only as answers to calls that it made itself.
    """
    return {"role": "user" if message.role == "tool" else message.role, "content": message.content}


def _stop(reason: str | None) -> AnswerStop:
    return "length" if reason == "length" else "filtered" if reason == "content_filter" else "stop"


def _require_openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise MissingDependency(
            "the package openai is not installed, which models behind an API need",
            hint="Install it: `pip install 'lehr[openai]'`",
        ) from error
    return openai
