"""The engine protocol: what every backend offers, whoever computes. docs/engines.md says how they differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from lehr.core.batch import Manifest
from lehr.core.errors import LehrError
from lehr.core.trace import Completion, Sampling, Version

InFlight = Literal["keep", "recompute", "abort"]
"""What happens to the keys and values of running requests when weights are swapped."""

Ranked = tuple[tuple[int, float], ...]
"""The likeliest tokens at a position with their ``raw_logprobs``, the best first."""

OnTokens = Callable[[Sequence[int], Sequence[float], Sequence[float], Sequence[Ranked]], None]
"""Called in the caller's loop with the new tokens of a step, with the ``logprobs`` and ``raw_logprobs`` of each
as :class:`~lehr.core.trace.Completion` has them, and with the alternatives to each, or []."""


class EngineError(LehrError, RuntimeError):
    """A request that the engine could not serve."""

    code = "engine"


class EngineBroken(EngineError):
    """An engine that cannot serve any request: it broke down, was closed, or waits for weights."""

    code = "engine_broken"


class RequestTooLarge(EngineError):
    """A request that can never fit; it alone fails, the engine lives on."""

    code = "request_too_large"


class UnknownSession(EngineError):
    """No request of the session that was named is waiting or running."""

    code = "unknown_session"


class Unsupported(EngineError):
    """An option that this backend cannot serve as it was asked for; it is named, and nothing was done."""

    code = "unsupported"


class BadConstraint(EngineError):
    """A constraint that cannot be held to; the request alone fails, the engine lives on."""

    code = "bad_constraint"


@dataclass(frozen=True, slots=True)
class TierStats:
    """What the slower tiers of the prefix cache hold and did. Counts since the engine began, but for the first
    three, which are bytes now. Blocks are the pool's.

    stored_blocks: queued for the tiers. memory_hits, disk_hits: blocks loaded back. dropped: segments that are
    kept no longer because queue or tiers were full. damaged: segments whose file was damaged or gone. chosen,
    refused: how often loading was expected to be faster than computing, and how often not.
    """

    queued_bytes: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    stored_blocks: int = 0
    memory_hits: int = 0
    disk_hits: int = 0
    dropped: int = 0
    damaged: int = 0
    chosen: int = 0
    refused: int = 0

    def __add__(self, other: TierStats) -> TierStats:
        """Return the sums."""
        return TierStats(*(getattr(self, n) + getattr(other, n) for n in TierStats.__dataclass_fields__))


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot. Block counts satisfy ``free + cached + held == total``; a backend that does not say which of
    its free blocks still hold a prefix counts them all as free.
    """

    version: Version
    running: int
    waiting: int
    blocks_free: int
    blocks_cached: int
    blocks_held: int
    blocks_total: int
    prompt_tokens: int
    cached_tokens: int
    own_tokens: int
    busy_s: float
    steps: int
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    tiers: TierStats = TierStats()

    @classmethod
    def of_all(cls, found: Sequence[EngineStats]) -> EngineStats:
        """Return sums over several engines; ``busy_s`` is their mean, ``version`` the oldest."""
        return cls(
            version=min(s.version for s in found),
            running=sum(s.running for s in found),
            waiting=sum(s.waiting for s in found),
            blocks_free=sum(s.blocks_free for s in found),
            blocks_cached=sum(s.blocks_cached for s in found),
            blocks_held=sum(s.blocks_held for s in found),
            blocks_total=sum(s.blocks_total for s in found),
            prompt_tokens=sum(s.prompt_tokens for s in found),
            cached_tokens=sum(s.cached_tokens for s in found),
            own_tokens=sum(s.own_tokens for s in found),
            busy_s=sum(s.busy_s for s in found) / len(found),
            steps=sum(s.steps for s in found),
            drafted_tokens=sum(s.drafted_tokens for s in found),
            accepted_tokens=sum(s.accepted_tokens for s in found),
            tiers=sum((s.tiers for s in found), TierStats()),
        )


class Engine(Protocol):
    """Serves completions. All methods are safe to call concurrently."""

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, *, session: str = "", timeout_s: float = 600.0
    ) -> Completion:
        """Return one completion of ``tokens``. ``session`` names the trace that the request belongs to.

        Raises :class:`RequestTooLarge`, :class:`EngineError` or ``DeadlineExceeded``. A cancelled caller
        frees the request's blocks at once.
        """
        ...

    async def score(self, tokens: Sequence[int], *, temperature: float = 1.0) -> NDArray[np.float32]:
        """Return float32[T-1]: the log-probability of each token after the first, given those before."""
        ...

    async def pause(self) -> None:
        """Sample no token from the return of this call until :meth:`resume`. Idempotent.

        Requests that run keep what they have, new ones wait, and the deadlines of both go on. Weight updates,
        :meth:`flush`, :meth:`abort` and :meth:`stats` work meanwhile.
        """
        ...

    async def resume(self) -> None:
        """Go on where :meth:`pause` stopped. Idempotent."""
        ...

    async def fetch(self, manifest: Manifest) -> None:
        """Load published weights beside the running ones, while sampling goes on."""
        ...

    async def activate(self, version: Version, in_flight: InFlight = "keep") -> None:
        """Switch to fetched weights between two decode steps. Versions only rise."""
        ...

    async def flush(self) -> None:
        """Forget every cached prefix: no later request finds what was computed before this call.

        Raises :class:`EngineError` where the backend cannot do that while requests run; a return is a success.
        """
        ...

    async def abort(self, session: str = "") -> int:
        """End the requests of ``session`` (all with "") with what they have; return how many there were.

        Raises :class:`UnknownSession` when the session that was named has none.
        """
        ...

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter in PEFT's format for requests that name it; one of the same name is replaced.

        Raises ``ConfigError`` that says what does not fit. Requests that run keep the adapter they have.
        """
        ...

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests that name it; its memory is free once those that run have ended."""
        ...

    async def stats(self) -> EngineStats:
        """Return a snapshot."""
        ...

    async def close(self) -> None:
        """Abort what runs and free everything. Idempotent."""
        ...
