"""An engine in another process, seen through the same protocol."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lehr.core.batch import Manifest
from lehr.core.trace import Completion, Sampling, Version
from lehr.engine.base import EngineStats, InFlight
from lehr.engine.bounds import packed_ids
from lehr.engine.messages import (
    AbortRequest,
    ActivateRequest,
    Allotment,
    GenerateRequest,
    LoadAdapter,
    ScoreRequest,
    UnloadAdapter,
)

_SLACK_S = 5.0


class Caller(Protocol):
    """A started role, as ``cluster.base.Handle`` is."""

    async def call(self, method: str, body: Any = None, *, returns: Any = None, timeout_s: float = 60.0) -> Any:
        """Send a request and return its answer decoded as ``returns``."""
        ...


class RemoteEngine:
    """Implements ``engine.base.Engine`` over the wire. The process itself belongs to whoever started it."""

    def __init__(self, handle: Caller) -> None:
        self._handle = handle

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, *, session: str = "", timeout_s: float = 600.0
    ) -> Completion:
        """Return one completion; a cancelled caller cancels the request over there."""
        body = GenerateRequest(packed_ids(tokens), sampling, session, timeout_s)
        return await self._handle.call("generate", body, returns=Completion, timeout_s=timeout_s + _SLACK_S)

    async def score(self, tokens: Sequence[int], *, temperature: float = 1.0) -> NDArray[np.float32]:
        """Return float32[T-1]: the log-probability of each token after the first."""
        body = ScoreRequest(packed_ids(tokens), temperature)
        return await self._handle.call("score", body, returns=NDArray[np.float32], timeout_s=600.0)

    async def pause(self) -> None:
        """Sample no token until :meth:`resume`."""
        await self._handle.call("pause")

    async def resume(self) -> None:
        """Go on."""
        await self._handle.call("resume")

    async def fetch(self, manifest: Manifest) -> None:
        """Load published weights beside the running ones, while sampling goes on."""
        await self._handle.call("fetch", manifest, timeout_s=600.0)

    async def activate(self, version: Version, in_flight: InFlight = "keep") -> None:
        """Switch to fetched weights between two decode steps."""
        await self._handle.call("activate", ActivateRequest(version, in_flight), timeout_s=600.0)

    async def flush(self) -> None:
        """Forget every cached prefix."""
        await self._handle.call("flush")

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Load an adapter, from a folder over there, for requests that name it."""
        await self._handle.call("load_adapter", LoadAdapter(name, str(folder)), timeout_s=600.0)

    async def unload_adapter(self, name: str) -> None:
        """Refuse new requests that name it."""
        await self._handle.call("unload_adapter", UnloadAdapter(name))

    async def abort(self, session: str = "") -> int:
        """End the requests of ``session`` (all with "") with what they have; return how many there were."""
        return await self._handle.call("abort", AbortRequest(session), returns=int)

    async def allot(self, allotment: Allotment) -> None:
        """Give the engine another share of the machine, from its next step on."""
        await self._handle.call("allot", allotment, timeout_s=600.0)

    async def stats(self) -> EngineStats:
        """Return a snapshot."""
        return await self._handle.call("stats", returns=EngineStats)

    async def close(self) -> None:
        """Abort what runs. The process ends when its cluster ends it. Idempotent."""
        await self.abort()
