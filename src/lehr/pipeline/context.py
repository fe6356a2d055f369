"""What the stages of a run share: the record, the roles, the boxes, the domains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lehr.cluster.base import Handle
from lehr.core.batch import Manifest
from lehr.core.trace import Sampling, Version
from lehr.domains.catalogue import Domain
from lehr.engine.messages import Allotment as EngineShare
from lehr.engine.router import Router
from lehr.ledger.blobs import BlobStore
from lehr.ledger.store import Ledger
from lehr.model.chat import ChatRenderer
from lehr.pipeline.cores import Allotment, Division
from lehr.pipeline.folder import RunFolder
from lehr.pipeline.metrics import BusyMeter, MetricsWriter
from lehr.pipeline.observer import Observer
from lehr.pipeline.recipe import Recipe
from lehr.rollout.group import GroupRunner
from lehr.sandbox.pool import Pool
from lehr.train.remote import RemoteTrainer
from lehr.wire.codec import encode


@dataclass
class Context:
    """Built once per start of a run; its owner closes what it holds."""

    recipe: Recipe
    folder: RunFolder
    ledger: Ledger
    blobs: BlobStore
    domains: Mapping[str, Domain]
    renderer: ChatRenderer
    pool: Pool
    engine: Router
    trainer_handle: Handle
    trainer: RemoteTrainer
    runner: GroupRunner
    verifying: BusyMeter
    metrics: MetricsWriter
    observer: Observer
    division: Division
    published: int = 0
    """The number of the newest weights that the trainer wrote out."""
    in_force: int = 0
    """The number of the weights that the engine samples from."""
    spent_s: dict[str, float] = field(default_factory=dict[str, float])

    async def allot(self, engine: Allotment | None = None, trainer: Allotment | None = None) -> None:
        """Give the roles their threads and cores."""
        if engine is not None:
            await self.engine.allot(EngineShare(engine.threads, engine.cores))
        if trainer is not None:
            await self.trainer_handle.call("allot", trainer)

    async def sync_weights(self) -> Version:
        """Publish the trainer's weights and put them in force in the engine. Returns their version."""
        manifest = await self.publish_weights()
        await self.put_in_force(manifest)
        return manifest.version

    async def publish_weights(self) -> Manifest:
        """Write the trainer's weights out. Once this returns, the trainer may change them."""
        self.published += 1
        return await self.trainer.publish(Version(self.ledger.incarnation, self.published))

    async def put_in_force(self, manifest: Manifest) -> None:
        """Let the engine sample from published weights."""
        await self.engine.fetch(manifest)
        await self.engine.activate(manifest.version)
        self.in_force = manifest.version.n

    def keep(self, value: Any) -> str:
        """Store ``value`` (a trace, a set of demonstrations) as a blob and return its digest."""
        return self.blobs.put(encode(value))

    @property
    def greedy(self) -> Sampling:
        """How evaluations sample."""
        return Sampling(temperature=0.0)
