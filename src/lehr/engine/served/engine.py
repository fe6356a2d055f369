"""The engine protocol over a server that speaks a dialect.

The server is used by this engine alone: another client would neither name its weight version in the prefix
cache nor be waited for when weights change.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
import uuid
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lehr.core.batch import Manifest
from lehr.core.errors import DeadlineExceeded, LehrError, UnknownName
from lehr.core.trace import Completion, KvPolicy, Sampling, Version
from lehr.engine.base import (
    EngineBroken,
    EngineStats,
    InFlight,
    UnknownSession,
    Unsupported,
)
from lehr.engine.bounds import require_newer, require_next, require_servable, require_temperature, token_ids
from lehr.engine.served.dialect import Dialect, Limits
from lehr.engine.served.folders import Fetched
from lehr.engine.served.process import ServerProcess

_ABORT_S = 30.0
_AGAIN_S = 0.2


@dataclass(eq=False, slots=True)
class _Live:
    """A request that was sent and not yet answered. kept: whether it runs through a change of weights."""

    session: str
    kept: bool = False
    over: asyncio.Event = field(default_factory=asyncio.Event)


class ServedEngine:
    """Implements ``engine.base.Engine``. Use it in the event loop that opened it.

    version: of the weights that the server has. lossy: whether it stores keys and values in fewer bits than the
    weights have. process: the server, if it is this engine's to end.
    """

    def __init__(
        self,
        dialect: Dialect,
        limits: Limits,
        fetched: Fetched,
        version: Version,
        *,
        lossy: bool = False,
        process: ServerProcess | None = None,
    ) -> None:
        self._dialect, self._limits, self._fetched, self._version = dialect, limits, fetched, version
        self._policy: KvPolicy = "quantized" if lossy else "exact"
        self._process = process
        self._live: dict[str, _Live] = {}
        self._settled = asyncio.Event()
        self._settled.set()
        self._switching = asyncio.Lock()
        self._paused = self._closed = False
        self._broken = ""
        self._chores: set[asyncio.Task[None]] = set()
        self._prompt_tokens = self._cached_tokens = self._own_tokens = 0
        self._busy_s, self._busy_since = 0.0, 0.0

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, *, session: str = "", timeout_s: float = 600.0
    ) -> Completion:
        """Return one completion. A request whose caller was cancelled is ended at the server."""
        prompt = token_ids(tokens)
        self._check(prompt, sampling)
        if sampling.max_tokens == 0:
            return _nothing()
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._settled.wait()
                self._usable()
                async with self._request(session) as (name, live):
                    left_s = timeout_s - (time.monotonic() - started)
                    done = await self._dialect.complete(name, prompt, sampling, self._version, left_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"a completion took more than {timeout_s} s") from error
        self._count(len(prompt), done)
        policy = "kept_across_versions" if live.kept and self._policy == "exact" else self._policy
        seconds = {"generate": time.monotonic() - started}
        return dataclasses.replace(done, kv_policy=policy, seconds=seconds)

    async def score(self, tokens: Sequence[int], *, temperature: float = 1.0) -> NDArray[np.float32]:
        """Return float32[T-1]: the log-probability of each token after the first."""
        require_temperature(temperature)
        prompt = token_ids(tokens)
        self._check(prompt, Sampling(max_tokens=1))  # servers score by sampling one token more
        if len(prompt) == 1:
            return np.zeros(0, np.float32)
        while True:
            await self._settled.wait()
            self._usable()
            async with self._request("") as (name, live):
                values = await self._dialect.score(name, prompt, temperature)
            if not live.kept:
                return values  # else the first tokens were scored by older weights than the last: again

    async def pause(self) -> None:
        """Sample no token until :meth:`resume`."""
        async with self._switching:
            self._usable()
            await self._dialect.pause()
            self._paused = True

    async def resume(self) -> None:
        """Go on."""
        async with self._switching:
            self._usable()
            await self._dialect.resume()
            self._paused = False

    async def fetch(self, manifest: Manifest) -> None:
        """Check published weights and lay them out for the server, while sampling goes on."""
        self._usable()
        require_newer(manifest.version, self._version)
        await self._fetched.add(manifest)

    async def activate(self, version: Version, in_flight: InFlight = "keep") -> None:
        """Switch to fetched weights. If it fails half way, the engine serves nothing any more."""
        async with self._switching:
            self._usable()
            if version == self._version:
                return
            require_next(version, self._version, self._fetched)
            self._settled.clear()
            try:
                await self._switch(version, in_flight)
            except BaseException as error:
                self._broken = f"weights {version} were not put in force: {error}"
                raise
            finally:
                self._settled.set()

    async def _switch(self, version: Version, in_flight: InFlight) -> None:
        if in_flight == "keep":
            for live in self._live.values():
                live.kept = True
        folder = self._fetched.folder(version)
        await self._dialect.load(folder, version, in_flight, busy=bool(self._live))
        self._version = version
        self._fetched.drop_before(version)
        if not self._paused:
            await self._dialect.resume()

    async def flush(self) -> None:
        """Empty the server's prefix cache, or raise :class:`EngineError`."""
        self._usable()
        await self._dialect.flush()

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Raise :class:`Unsupported`: adapters are the native engine's."""
        raise Unsupported(f"an engine behind a server takes no adapters; {name!r} was not loaded")

    async def unload_adapter(self, name: str) -> None:
        """Raise ``UnknownName``: none is loaded."""
        raise UnknownName.among("adapter", name, ())

    async def abort(self, session: str = "") -> int:
        """End the requests of ``session`` (all with "") with what they have; return how many there were."""
        chosen = {name: r for name, r in self._live.items() if not session or r.session == session}
        if session and not chosen:
            raise UnknownSession(f"session {session!r} has no request that waits or runs")
        deadline = time.monotonic() + _ABORT_S
        while pending := [name for name, request in chosen.items() if not request.over.is_set()]:
            await self._dialect.abort(pending)  # again and again: one may still be on its way to the server
            waits = [asyncio.ensure_future(chosen[name].over.wait()) for name in pending]
            _, late = await asyncio.wait(waits, timeout=_AGAIN_S)
            for wait in late:
                wait.cancel()
            if late and time.monotonic() > deadline:
                raise DeadlineExceeded(f"{len(late)} aborted requests did not end within {_ABORT_S:g} s")
        return len(chosen)

    async def stats(self) -> EngineStats:
        """Return a snapshot: of the server, and of what this engine asked it for."""
        gauges = await self._dialect.gauges()
        return EngineStats(
            version=self._version,
            running=gauges.running,
            waiting=gauges.waiting,
            blocks_free=gauges.total - gauges.held,
            blocks_cached=0,
            blocks_held=gauges.held,
            blocks_total=gauges.total,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            own_tokens=self._own_tokens,
            busy_s=self._busy_s + (time.monotonic() - self._busy_since if self._live else 0.0),
            steps=gauges.steps,
            drafted_tokens=gauges.drafted,
            accepted_tokens=gauges.accepted,
        )

    async def close(self) -> None:
        """Abort what runs; end the server if this engine started it. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with suppress(LehrError):  # a server that is gone has nothing left to end
            await self.abort()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await self._dialect.close()
        if self._process is not None:
            await self._process.end()
        self._fetched.close()

    @asynccontextmanager
    async def _request(self, session: str) -> AsyncGenerator[tuple[str, _Live]]:
        name, live = f"lehr-{uuid.uuid4().hex}", _Live(session)
        if not self._live:
            self._busy_since = time.monotonic()
        self._live[name] = live
        try:
            yield name, live
        except BaseException:
            self._later(self._dialect.abort([name]))
            raise
        finally:
            del self._live[name]
            live.over.set()
            if not self._live:
                self._busy_s += time.monotonic() - self._busy_since

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work`` beside what follows: nobody waits for it, and what it fails at no longer matters."""

        async def quietly() -> None:
            with suppress(LehrError):
                await work

        chore = asyncio.create_task(quietly())
        self._chores.add(chore)
        chore.add_done_callback(self._chores.discard)

    def _count(self, prompt_tokens: int, done: Completion) -> None:
        self._prompt_tokens += prompt_tokens
        self._cached_tokens += done.cached_tokens
        self._own_tokens += len(done.tokens)

    def _usable(self) -> None:
        if self._closed:
            raise EngineBroken("the engine is closed")
        if self._broken:
            raise EngineBroken(f"the engine broke down: {self._broken}", hint="Start it again.")
        if self._process is not None:
            self._process.check()

    def _check(self, prompt: list[int], sampling: Sampling) -> None:
        limits = self._limits
        require_servable(
            prompt,
            sampling,
            room=limits.length,
            vocab_size=limits.vocabulary,
            knows_text=True,
            widen="start the server with a greater length",
        )  # stop strings are the server's; where it cannot find them, its dialect refuses
        usual = Sampling()
        for name in ("constraint", "alternatives", "adapter"):
            if getattr(sampling, name) != getattr(usual, name):
                raise Unsupported(
                    f"an engine behind a server cannot sample with {name}={getattr(sampling, name)!r}",
                    hint="The native engine can.",
                )
        self._dialect.refuse(sampling)


def _nothing() -> Completion:
    none = np.zeros(0, np.float32)
    return Completion(np.zeros(0, np.int32), none, none, none, np.zeros(0, np.int64), "length")
