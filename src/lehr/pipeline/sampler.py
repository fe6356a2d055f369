"""A model that can be sampled from, with boxes and judges: what evaluation and ``try`` need, without a run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from lehr.cluster.base import Cluster, Role
from lehr.cluster.local import LocalCluster
from lehr.engine.messages import Allotment
from lehr.engine.native.settings import NativeConfig
from lehr.engine.remote import RemoteEngine
from lehr.engine.router import Router
from lehr.model.base import Renderer
from lehr.pipeline.cores import divide
from lehr.pipeline.models import context_tokens, load_renderer
from lehr.pipeline.recipe import SandboxConfig
from lehr.rollout.agent import AgentLoop
from lehr.rollout.group import GroupRunner
from lehr.sandbox.pool import Pool

MOST_ENGINES = 4
"""Engines that are started unless more are asked for; each holds the weights once, and twice during a swap."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """Engines in their own processes, and what turns their tokens into judged attempts."""

    engine: Router
    renderer: Renderer
    pool: Pool
    runner: GroupRunner


@asynccontextmanager
async def open_sampler(
    model: Path,
    *,
    engine: NativeConfig | None = None,
    engines: int | None = None,
    sandbox: SandboxConfig | None = None,
) -> AsyncGenerator[Sampler]:
    """Start engines on ``model`` with all cores; end them whatever happens."""
    engine, sandbox = engine or NativeConfig(), sandbox or SandboxConfig()
    with tempfile.TemporaryDirectory(prefix="lehr-") as scratch:
        cluster = LocalCluster(Path(scratch))
        pool = Pool(sandbox.backend, warm=sandbox.warm, limit=sandbox.boxes)
        try:
            router = await start_engines(cluster, model, engine, engines, incarnation=1)
            renderer = load_renderer(model)
            agent = AgentLoop(router, renderer, pool, context_tokens=context_tokens(model))
            yield Sampler(router, renderer, pool, GroupRunner(agent, pool))
        finally:
            await asyncio.shield(_close(cluster, pool))


async def start_engines(
    cluster: Cluster,
    model: Path,
    config: NativeConfig,
    count: int | None,
    *,
    incarnation: int,
    name: str = "engine",
) -> Router:
    """Start ``count`` embedded engines (one per core, at most ``MOST_ENGINES``, if it is None) that begin with
    the weights of ``model``. They share the cores and the ``cache_tokens`` of ``config`` evenly. name: of their
    roles, with a number after it.
    """
    whole = divide().sampling
    count = count or min(len(whole.cores), MOST_ENGINES)
    parts = Allotment(whole.threads, whole.cores).divided(count)
    native = config.model_copy(update={"cache_tokens": max(16, config.cache_tokens // count)})
    body = {"model": str(model), "native": native.model_dump(), "incarnation": incarnation}
    async with asyncio.TaskGroup() as tasks:
        starting = [
            tasks.create_task(
                cluster.start(Role(f"{name}-{number}", "lehr.engine.role:build", body, threads=part.threads))
            )
            for number, part in enumerate(parts)
        ]
    router = Router([RemoteEngine(task.result()) for task in starting])
    await router.allot(Allotment(whole.threads, whole.cores))
    return router


async def _close(cluster: LocalCluster, pool: Pool) -> None:
    await cluster.close()
    await pool.close()
