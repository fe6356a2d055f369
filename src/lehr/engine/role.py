"""An engine in a process of its own: target ``lehr.engine.role:build``."""

from __future__ import annotations

import logging
import os
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lehr.core.batch import Manifest
from lehr.core.config import Config, resolve
from lehr.core.trace import Completion, Version
from lehr.engine.base import EngineBroken, EngineStats
from lehr.engine.local import LocalEngine
from lehr.engine.messages import AbortRequest, ActivateRequest, Allotment, GenerateRequest, ScoreRequest
from lehr.engine.native.settings import NativeConfig
from lehr.engine.opening import open_any
from lehr.model.fetch import locate
from lehr.model.memory import keep_freed_memory

log = logging.getLogger("lehr.engine")


class EngineRoleConfig(Config):
    """What an engine's process is started with."""

    model: str
    """Name of a fetched model, or a model folder."""
    native: NativeConfig = NativeConfig()
    """How much runs at once."""
    incarnation: int = 0
    """Version of the weights in ``model``, with ``n``."""
    n: int = 0
    """Version of the weights in ``model``, with ``incarnation``."""
    threads: int | None = None
    """Threads of torch; the default is one for each core that the process may run on."""
    await_weights: bool = False
    """Take no work before the first activation: for an engine that was started again."""


class EngineService:
    """The requests that an engine's process answers."""

    def __init__(self, engine: LocalEngine, *, await_weights: bool) -> None:
        self._engine = engine
        self._awaits = await_weights

    async def generate(self, request: GenerateRequest) -> Completion:
        """Return one completion."""
        if self._awaits:
            raise EngineBroken("this engine was started again and has no current weights yet")
        return await self._engine.generate(
            request.tokens.tolist(), request.sampling, session=request.session, timeout_s=request.timeout_s
        )

    async def score(self, request: ScoreRequest) -> NDArray[np.float32]:
        """Return the log-probability of each token after the first."""
        return await self._engine.score(request.tokens.tolist(), temperature=request.temperature)

    async def pause(self) -> None:
        """Compute no further step."""
        await self._engine.pause()

    async def resume(self) -> None:
        """Go on."""
        await self._engine.resume()

    async def fetch(self, manifest: Manifest) -> None:
        """Load published weights beside the running ones."""
        await self._engine.fetch(manifest)

    async def activate(self, request: ActivateRequest) -> None:
        """Switch to fetched weights."""
        await self._engine.activate(request.version, request.in_flight)
        self._awaits = False

    async def flush(self) -> None:
        """Forget every cached prefix."""
        await self._engine.flush()

    async def abort(self, request: AbortRequest) -> int:
        """End requests with what they have; return how many there were."""
        return await self._engine.abort(request.session)

    async def allot(self, allotment: Allotment) -> None:
        """Use another share of the machine from the next step on."""
        await self._engine.allot(allotment)

    async def stats(self) -> EngineStats:
        """Return a snapshot."""
        return await self._engine.stats()

    async def close(self) -> None:
        """Abort what runs and end the engine."""
        await self._engine.close()


def build(config: dict[str, Any]) -> EngineService:
    """Return the service that ``config`` (an :class:`EngineRoleConfig`) describes."""
    settings = resolve(EngineRoleConfig, config, where="engine role")
    keep_freed_memory()
    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
    version = Version(settings.incarnation, settings.n)
    engine = open_any(locate(settings.model), settings.native, version, note=log.warning)
    return EngineService(engine, await_weights=settings.await_weights)
