"""From a checked body to completions: prompts, admission, the engine, text."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from lehr.app.serve.errors import ApiError, stopping, too_long
from lehr.app.serve.metrics import Meter
from lehr.app.serve.requests import Body, ChatBody, CompletionBody
from lehr.app.serve.shapes import answer_shape, call_shape
from lehr.app.serve.text import Piece, Scored, TextStream
from lehr.app.serve.tools import Call, ToolStream
from lehr.core.trace import Completion, Constraint, Sampling
from lehr.engine.base import BadConstraint, EngineStats, OnTokens, Ranked
from lehr.engine.native.cache import BLOCK
from lehr.model.chat import ChatRenderer
from lehr.model.config import load_config
from lehr.model.outline import outline
from lehr.model.scaling import RopeScaling
from lehr.model.tokenizer import AnyTokenizer, load_tokenizer
from lehr.rollout.agent import derive_seed

RETRY_AFTER_S = 2


class StreamingEngine(Protocol):
    """The part of ``engine.local.LocalEngine`` that serving needs."""

    async def stream(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        on_tokens: OnTokens | None,
        *,
        session: str = "",
        timeout_s: float = 600.0,
    ) -> Completion:
        """Return one completion, telling ``on_tokens`` what each step sampled."""
        ...

    async def stats(self) -> EngineStats:
        """Return a snapshot."""
        ...


@dataclass(frozen=True, slots=True)
class Served:
    """The model: the id that clients name, how it reads and writes, and what it can hold. adapters: ids under
    which it answers with an adapter.
    """

    id: str
    tokenizer: AnyTokenizer
    renderer: ChatRenderer
    stop_ids: frozenset[int]
    context_tokens: int
    vocab_size: int
    adapters: tuple[str, ...] = ()


def served(
    folder: Path,
    name: str,
    cache_tokens: int,
    adapters: tuple[str, ...] = (),
    scaling: RopeScaling | None = None,
) -> Served:
    """Return what is served from a model folder, with as much context as model and cache hold."""
    found = outline(folder)
    tokenizer = load_tokenizer(folder)
    renderer = ChatRenderer(tokenizer)
    stop_ids = frozenset({*renderer.stop_ids, *found.eos_ids})
    positions = load_config(folder).scaled(scaling).max_positions if scaling else found.max_positions
    room = min(positions, cache_tokens // BLOCK * BLOCK)
    return Served(name, tokenizer, renderer, stop_ids, room, found.vocab_size, adapters)


@dataclass(frozen=True, slots=True)
class Limits:
    """running: completions in one step. waiting: completions in line. timeout_s: a request's whole time."""

    running: int = 64
    waiting: int = 256
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Job:
    """One completion to be made."""

    tokens: list[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Delta:
    """What one choice gained. ``finish`` is set with the last."""

    index: int
    text: str = ""
    calls: tuple[Call, ...] = ()
    tokens: tuple[Scored, ...] = ()
    finish: str | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request. A prompt counts once, however many completions it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Service:
    """Makes completions. One per server; everything in its event loop.

    aborting: set when the requests that are left have to end.
    """

    def __init__(self, engine: StreamingEngine, model: Served, limits: Limits, meter: Meter) -> None:
        self.engine, self.model, self.limits, self.meter = engine, model, limits, meter
        self.aborting = asyncio.Event()
        self.stopping = False
        self.live = 0
        self.requests = 0

    @contextmanager
    def admitted(self, count: int) -> Generator[None]:
        """Hold places for ``count`` completions. Raises :class:`ApiError` 429 where too many wait, or 503."""
        if self.stopping:
            raise stopping()
        if self.live >= self.limits.running + self.limits.waiting:
            waiting = self.live - self.limits.running
            message = (
                f"{waiting} completions are waiting. Expected fewer than {self.limits.waiting}; try later."
            )
            headers = {"retry-after": str(RETRY_AFTER_S)}
            raise ApiError(429, message, code="too_many_requests", headers=headers)
        self.live += count
        self.requests += 1
        try:
            yield
        finally:
            self.live -= count
            self.requests -= 1

    def require_model(self, name: str) -> None:
        """Raise :class:`ApiError` 404 unless ``name`` is the model that is served, or one of its adapters."""
        known = (self.model.id, *self.model.adapters)
        if name not in known:
            message = f"the model {name[:200]!r} is not served. Expected {' or '.join(map(repr, known))}."
            raise ApiError(404, message, code="model_not_found", param="model")

    def jobs(self, body: Body) -> list[Job]:
        """Return the completions that ``body`` asks for, prompt by prompt. Takes a while for a long prompt."""
        param = "messages" if isinstance(body, ChatBody) else "prompt"
        jobs: list[Job] = []
        for tokens in self._prompts(body):
            room = self.model.context_tokens - len(tokens)
            if room < 1 or (body.wanted is not None and body.wanted > room):
                raise too_long(len(tokens), None if room < 1 else body.wanted, self.model.context_tokens, param)
            sampling = body.sampling(body.wanted or room, self.model.vocab_size)
            sampling = replace(
                sampling,
                constraint=self._constraint(body),
                adapter=body.model if body.model in self.model.adapters else "",
            )
            for number in range(body.n):
                seed = sampling.seed
                seed = derive_seed(seed, number) if seed is not None and number else seed
                jobs.append(Job(tokens, replace(sampling, seed=seed)))
        return jobs

    def _constraint(self, body: Body) -> Constraint | None:
        """Return what the answer has to look like; None where it may be any text."""
        if not isinstance(body, ChatBody):
            return None
        schema = body.response_format.json_schema
        answer = None if body.response_format.type == "text" else answer_shape(schema and schema.schema_)
        forced = body.forced
        tools = forced if forced is not None else body.tools if body.offered else []
        if not tools or (forced is None and answer is None and not any(t.function.strict for t in tools)):
            return answer
        signatures = [(t.function.name, t.function.parameters, bool(t.function.strict)) for t in tools]
        form = self.model.renderer.call_form
        return call_shape(signatures, form, forced=forced is not None, answer=answer)

    def _prompts(self, body: Body) -> list[list[int]]:
        if isinstance(body, ChatBody):
            return [self.model.renderer.start(tuple(m.message() for m in body.messages), body.offered)]
        if not isinstance(body, CompletionBody):
            raise TypeError(f"no prompt in a {type(body).__name__}")
        prompts: list[list[int]] = []
        for prompt in body.prompt:
            text = isinstance(prompt, str)
            tokens = [*self.model.tokenizer.prefix, *self.model.tokenizer.encode(prompt)] if text else prompt
            if not prompt:
                raise ApiError(400, "the prompt is empty. Expected text.", param="prompt", code="invalid_value")
            bad = next((t for t in tokens if not 0 <= t < self.model.vocab_size), None)
            if bad is not None:
                message = f"token {bad} is outside the vocabulary. Expected ids below {self.model.vocab_size}."
                raise ApiError(400, message, param="prompt", code="invalid_value")
            prompts.append(list(tokens))
        return prompts

    async def run(
        self, body: Body, jobs: Sequence[Job], tell: Callable[[Delta], None], arrived: float, session: str
    ) -> Usage:
        """Make all completions at once; ``tell`` is called with what each gains. Raises one error, of any."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._choice(index, job, body, tell, arrived, session))
                for index, job in enumerate(jobs)
            ]
        done = [task.result() for task in tasks]
        firsts = range(0, len(jobs), body.n)
        return Usage(
            prompt_tokens=sum(len(jobs[i].tokens) for i in firsts),
            completion_tokens=sum(len(completion.tokens) for completion in done),
            cached_tokens=sum(done[i].cached_tokens for i in firsts),
        )

    async def _choice(
        self, index: int, job: Job, body: Body, tell: Callable[[Delta], None], arrived: float, session: str
    ) -> Completion:
        text = TextStream(self.model.tokenizer, job.sampling.stop, self.model.stop_ids)
        offered = body.offered if isinstance(body, ChatBody) else ()
        calls = ToolStream({tool.name for tool in offered}) if offered else None
        last = 0.0
        unsaid: list[Scored] = []

        def pass_on(piece: Piece, finish: str | None = None, *, ends: bool = False) -> None:
            found: list[str | Call] = [piece.text] if piece.text else []
            if calls is not None:
                found = [*calls.add(piece.text), *(calls.end() if ends else [])]
                finish = "tool_calls" if ends and calls.called and finish == "stop" else finish
            unsaid.extend(piece.tokens if body.scored else ())
            if not found and finish is None:
                return
            said = "".join(item for item in found if isinstance(item, str))
            made = tuple(item for item in found if isinstance(item, Call))
            tell(Delta(index, said, made, tuple(unsaid), finish))
            unsaid.clear()

        def on_tokens(
            tokens: Sequence[int],
            logprobs: Sequence[float],
            raw_logprobs: Sequence[float],
            alternatives: Sequence[Ranked],
        ) -> None:
            nonlocal last
            now = time.monotonic()
            if last:
                for _ in tokens:
                    self.meter.per_token.observe((now - last) / len(tokens))
            else:
                self.meter.first_token.observe(now - arrived)
            last = now
            pass_on(text.add(tokens, raw_logprobs, alternatives))

        left_s = max(0.001, arrived + self.limits.timeout_s - time.monotonic())
        try:
            completion = await self.engine.stream(
                job.tokens, job.sampling, on_tokens, session=session, timeout_s=left_s
            )
        except BadConstraint as error:
            raise ApiError(400, str(error), code="invalid_schema", param=_shaped_by(body)) from error
        if completion.stop == "abort":
            raise stopping()
        pass_on(text.end(), "length" if completion.stop == "length" else "stop", ends=True)
        return completion


def _shaped_by(body: Body) -> str:
    formatted = isinstance(body, ChatBody) and body.response_format.type != "text" and not body.forced
    return "response_format" if formatted else "tools"
