"""A model that can be sampled from, with boxes and judges: what evaluation and ``try`` need, without a run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from lehr.cluster.base import Role
from lehr.cluster.local import LocalCluster
from lehr.engine.native.settings import NativeConfig
from lehr.engine.remote import RemoteEngine
from lehr.model.base import Renderer
from lehr.pipeline.cores import divide
from lehr.pipeline.models import context_tokens, load_renderer
from lehr.pipeline.recipe import SandboxConfig
from lehr.rollout.agent import AgentLoop
from lehr.rollout.group import GroupRunner
from lehr.sandbox.pool import Pool


@dataclass(frozen=True, slots=True)
class Sampler:
    """An engine in its own process, and what turns its tokens into judged attempts."""

    engine: RemoteEngine
    renderer: Renderer
    pool: Pool
    runner: GroupRunner


@asynccontextmanager
async def open_sampler(
    model: Path, *, engine: NativeConfig | None = None, sandbox: SandboxConfig | None = None
) -> AsyncGenerator[Sampler]:
    """Start an engine on ``model`` with all cores; end it whatever happens."""
    engine, sandbox = engine or NativeConfig(), sandbox or SandboxConfig()
    with tempfile.TemporaryDirectory(prefix="lehr-") as scratch:
        cluster = LocalCluster(Path(scratch))
        pool = Pool(sandbox.backend, warm=sandbox.warm, limit=sandbox.boxes)
        try:
            handle = await cluster.start(engine_role(model, engine, incarnation=1))
            remote = RemoteEngine(handle)
            renderer = load_renderer(model)
            agent = AgentLoop(remote, renderer, pool, context_tokens=context_tokens(model))
            yield Sampler(remote, renderer, pool, GroupRunner(agent, pool))
        finally:
            await asyncio.shield(_close(cluster, pool))


def engine_role(model: Path, config: NativeConfig, *, incarnation: int) -> Role:
    """Return the role of an embedded engine that begins with the weights of ``model``."""
    body = {"model": str(model), "native": config.model_dump(), "incarnation": incarnation}
    return Role("engine", "lehr.engine.role:build", body, threads=divide().sampling.threads)


async def _close(cluster: LocalCluster, pool: Pool) -> None:
    await cluster.close()
    await pool.close()
