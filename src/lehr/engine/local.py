"""An engine that computes in steps behind the asynchronous protocol, in this process.

A thread of its own runs step after step; between two of them it does whatever callers asked for, so that
nothing ever touches the engine while it computes. A fault inside a step ends every request with it, and
every later one: an engine that is broken says so.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from lehr.core.batch import Manifest
from lehr.core.errors import DeadlineExceeded
from lehr.core.trace import Completion, Sampling, Version
from lehr.engine.base import BadConstraint, EngineBroken, EngineStats, InFlight, OnTokens, UnknownSession
from lehr.engine.messages import Allotment
from lehr.engine.native.engine import FIRST, NativeEngine
from lehr.engine.native.request import Request
from lehr.engine.native.settings import NativeConfig
from lehr.model.chat import ChatRenderer
from lehr.model.checkpoint import load_decoder
from lehr.model.dtype import compute_dtype
from lehr.model.fetch import locate
from lehr.model.tokenizer import load_tokenizer

T = TypeVar("T")

COMPILE_S = 10.0
"""How long a constraint may take to compile, those before it included."""


class Stepper(Protocol):
    """What :class:`LocalEngine` drives: ``native.engine.NativeEngine`` or another that computes in steps. All
    of it is called from one thread, between two steps, but for :meth:`load`, :meth:`prepare` and
    :meth:`read_adapter`, which may run in any.
    """

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        ...

    def prepare(self, sampling: Sampling) -> None:
        """Compile what ``sampling`` needs, so that :meth:`submit` finds it. May run in any thread."""
        ...

    def submit(self, tokens: Sequence[int], sampling: Sampling, session: str = "") -> Request:
        """Queue a request and return it. Raises :class:`RequestTooLarge` or :class:`EngineError`."""
        ...

    def cancel(self, request: Request) -> None:
        """End a request with what it has; a finished one stays as it is."""
        ...

    def live(self) -> list[Request]:
        """Return every request that is not finished."""
        ...

    def step(self) -> list[Request]:
        """Compute one step and return the requests that it finished."""
        ...

    def score(self, tokens: Sequence[int], temperature: float = 1.0) -> NDArray[np.float32]:
        """Return float32[T-1], the log-probability of each token after the first."""
        ...

    def load(self, manifest: Manifest) -> Any:
        """Return published weights for :meth:`offer`. May run in any thread."""
        ...

    def offer(self, version: Version, weights: Any, /) -> None:
        """Keep what :meth:`load` returned ready for :meth:`activate`."""
        ...

    def activate(self, version: Version, in_flight: InFlight = "keep") -> list[Request]:
        """Switch to offered weights; return the requests that this ended."""
        ...

    def flush(self) -> None:
        """Forget every cached prefix."""
        ...

    def read_adapter(self, folder: Path) -> Any:
        """Return the adapter in ``folder`` for :meth:`load_adapter`. May run in any thread."""
        ...

    def load_adapter(self, name: str, parts: Any, /) -> None:
        """Serve requests that name it from now on."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Refuse requests that name it from now on; those that run go on."""
        ...

    def stats(self) -> EngineStats:
        """Return a snapshot."""
        ...

    def close(self) -> None:
        """Free what lies outside this object: files and threads. Called last, from any thread. Idempotent."""
        ...


@dataclass(eq=False, slots=True)
class _Waiter:
    """A coroutine that waits for a request, the loop it runs in, and how many tokens it was told of."""

    future: asyncio.Future[Completion]
    loop: asyncio.AbstractEventLoop
    on_tokens: OnTokens | None = None
    told: int = 0

    def tell(self, request: Request) -> None:
        """Pass on what was sampled since the last time."""
        if self.on_tokens is not None and request.own > self.told:
            tokens = request.tokens[request.prompt_length + self.told :]
            logprobs, raw = request.logprobs[self.told :], request.raw_logprobs[self.told :]
            _call(self.loop, self.on_tokens, tokens, logprobs, raw, request.alternatives[self.told :])
            self.told = request.own


class LocalEngine:
    """Implements ``engine.base.Engine``. Ready when built; :meth:`close` ends its thread."""

    def __init__(self, stepper: Stepper) -> None:
        self._stepper = stepper
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._waiters: dict[Request, _Waiter] = {}
        self._closed = False
        self._paused = False
        self._broken: BaseException | None = None
        self._compiler = ThreadPoolExecutor(1, "compiler")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, *, session: str = "", timeout_s: float = 600.0
    ) -> Completion:
        """Return one completion. A cancelled caller frees the request's blocks before the next step."""
        return await self.stream(tokens, sampling, None, session=session, timeout_s=timeout_s)

    async def stream(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        on_tokens: OnTokens | None,
        *,
        session: str = "",
        timeout_s: float = 600.0,
    ) -> Completion:
        """As :meth:`generate`, telling ``on_tokens`` what each step sampled, all of it before this returns."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        started: list[Request] = []

        def begin() -> None:
            if future.cancelled():
                return
            request = self._stepper.submit(tokens, sampling, session)
            started.append(request)
            self._waiters[request] = _Waiter(future, loop, on_tokens)
            if request.finished:
                self._deliver([request])

        def stop() -> None:
            for request in started:
                if self._waiters.pop(request, None) is not None:
                    self._stepper.cancel(request)

        try:
            async with asyncio.timeout(timeout_s):
                if sampling.constraint is not None:
                    await self._compiled(sampling)
                await self._between_steps(begin)
                return await future
        except TimeoutError as error:
            raise DeadlineExceeded(f"a completion took more than {timeout_s} s") from error
        finally:
            if not (future.done() and not future.cancelled()):
                future.cancel()
                with suppress(EngineBroken):  # then it has let go of the request already
                    self._post(stop)

    async def _compiled(self, sampling: Sampling) -> None:
        """Compile a constraint beside the engine's thread, one at a time; sampling goes on meanwhile."""
        with self._wake:
            self._require_alive()
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(self._compiler, self._stepper.prepare, sampling)
        work.add_done_callback(lambda w: w.cancelled() or w.exception())
        done, _ = await asyncio.wait({work}, timeout=COMPILE_S)
        if not done:
            work.cancel()
            raise BadConstraint(
                f"the constraint was not compiled within {COMPILE_S:g} s", hint="Simplify it, or try later."
            )
        if work.cancelled():  # by close
            self._require_alive()
        work.result()

    async def score(self, tokens: Sequence[int], *, temperature: float = 1.0) -> NDArray[np.float32]:
        """Return float32[T-1]: the log-probability of each token after the first."""
        return await self._between_steps(lambda: self._stepper.score(tokens, temperature))

    async def pause(self) -> None:
        """Compute no further step until :meth:`resume`; the one under way is over when this returns."""
        await self._between_steps(lambda: self._hold(True))

    async def resume(self) -> None:
        """Go on."""
        await self._between_steps(lambda: self._hold(False))

    def _hold(self, paused: bool) -> None:
        self._paused = paused

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter, in PEFT's format, for requests that name it; one of the same name is replaced.

        Raises :class:`ConfigError` that says what does not fit. Requests that run keep the adapter they have.
        """
        parts = await asyncio.to_thread(self._stepper.read_adapter, folder)
        await self._between_steps(lambda: self._stepper.load_adapter(name, parts))

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests that name it; its memory is free once those that run have ended."""
        await self._between_steps(lambda: self._stepper.unload_adapter(name))

    async def fetch(self, manifest: Manifest) -> None:
        """Load published weights beside the running ones, while sampling goes on."""
        weights = await asyncio.to_thread(self._stepper.load, manifest)
        await self._between_steps(lambda: self._stepper.offer(manifest.version, weights))

    async def activate(self, version: Version, in_flight: InFlight = "keep") -> None:
        """Switch to fetched weights between two decode steps."""
        await self._between_steps(lambda: self._deliver(self._stepper.activate(version, in_flight)))

    async def flush(self) -> None:
        """Forget every cached prefix. Running requests go on, and what they computed so far is not cached."""
        await self._between_steps(self._stepper.flush)

    async def abort(self, session: str = "") -> int:
        """End the requests of ``session`` (all with "") with what they have; return how many there were."""

        def end() -> int:
            chosen = [r for r in self._stepper.live() if not session or r.session == session]
            if session and not chosen:
                raise UnknownSession(f"session {session!r} has no request that waits or runs")
            for request in chosen:
                self._stepper.cancel(request)
            self._deliver(chosen)
            return len(chosen)

        return await self._between_steps(end)

    async def allot(self, allotment: Allotment) -> None:
        """Use another number of threads, and other cores, from the next step on."""

        def apply() -> None:
            torch.set_num_threads(allotment.threads)
            if allotment.cores:
                for thread in os.listdir("/proc/self/task"):
                    try:
                        os.sched_setaffinity(int(thread), allotment.cores)
                    except ProcessLookupError:
                        continue  # the thread ended between listing and pinning

        await self._between_steps(apply)

    async def stats(self) -> EngineStats:
        """Return a snapshot, taken between two steps."""
        return await self._between_steps(self._stepper.stats)

    async def close(self) -> None:
        """Abort what runs and end the thread. Idempotent."""
        if self._closed:
            return
        try:
            with suppress(EngineBroken):  # then nothing runs
                await self.abort()
        finally:
            with self._wake:
                self._closed = True
                self._wake.notify()
            self._compiler.shutdown(wait=False, cancel_futures=True)
            await asyncio.to_thread(self._thread.join)
            await asyncio.to_thread(self._stepper.close)

    async def _between_steps(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the engine's thread before its next step, and return its result."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                self._require_alive()
                result = work()
            except Exception as error:  # the boundary: the caller gets it, the engine lives on
                _call(loop, _set, answer, None, error)
            else:
                _call(loop, _set, answer, result, None)

        self._post(run)
        return await answer

    def _post(self, work: Callable[[], None]) -> None:
        with self._wake:
            self._require_alive()
            self._commands.append(work)
            self._wake.notify()

    def _require_alive(self) -> None:
        over = self._why_over()
        if over is not None:
            raise over from self._broken

    def _why_over(self) -> EngineBroken | None:
        if self._broken is not None:
            return EngineBroken(f"the engine broke down: {self._broken!r}")
        return EngineBroken("the engine is closed") if self._closed else None

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._commands and (self._paused or self._stepper.idle) and not self._closed:
                    self._wake.wait()
                count = len(self._commands)
            if self._closed:
                self._let_go()
                return
            try:
                for _ in range(count):
                    self._commands.popleft()()
                done = [] if self._paused else self._stepper.step()
                for request, waiter in self._waiters.items():
                    waiter.tell(request)
                self._deliver(done)
            except Exception as error:  # the boundary: no request may wait for an engine that is gone
                self._break(error)
                return

    def _deliver(self, done: Sequence[Request]) -> None:
        for request in done:
            waiter = self._waiters.pop(request, None)
            if waiter is not None:
                waiter.tell(request)
                answer = None if request.error else request.completion()
                _call(waiter.loop, _set, waiter.future, answer, request.error)

    def _break(self, error: Exception) -> None:
        with self._wake:
            self._broken = error
        self._let_go()

    def _let_go(self) -> None:
        """Answer everybody who still waits, those who asked during the last step as well: none is to come."""
        for waiter in self._waiters.values():
            _call(waiter.loop, _set, waiter.future, None, self._why_over())
        self._waiters.clear()
        while self._commands:
            self._commands.popleft()()


def _set(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: Any) -> None:
    """Run ``function`` in ``loop``; a loop that was closed has nobody left to tell."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function, *arguments)


def open_engine(folder: Path, config: NativeConfig | None = None, version: Version = FIRST) -> LocalEngine:
    """Return an engine on the model in ``folder``, whose stop tokens and tokenizer it takes from there."""
    config = config or NativeConfig()
    tokenizer = load_tokenizer(folder)
    dtype = compute_dtype(config.dtype)
    decoder = load_decoder(folder, dtype, config.rope_scaling)
    stop_ids = {*ChatRenderer(tokenizer).stop_ids, *decoder.config.eos_ids}
    draft = load_decoder(locate(config.draft_model), dtype) if config.draft_model else None
    native = NativeEngine(
        decoder, config=config, tokenizer=tokenizer, stop_ids=stop_ids, version=version, draft=draft
    )
    return LocalEngine(native)
