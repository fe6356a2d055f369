"""The trainer as a role: builds a :class:`LocalTrainer` inside its own process and serves it.

Work runs in one thread of its own, so that the event loop goes on answering heartbeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from lehr.core.batch import Batch, Manifest, Sample, StepResult
from lehr.core.config import Config, Count
from lehr.core.trace import Version
from lehr.train.base import TrainConfig

T = TypeVar("T")


class TrainerConfig(Config):
    """The configuration of the role."""

    model: str
    """Hugging Face folder to start from."""
    publish_to: str = ""
    """Folder for published weights; a memory file system is best. Nothing can be published without one."""
    scalar: bool = False
    """Under a scalar head: a critic or a reward model. A language model gets a new one."""
    frozen: bool = False
    """It is only asked what it says of samples; nothing that training needs is held."""
    train: TrainConfig = TrainConfig()
    ranks: Count = 1
    """Processes that train together."""
    seed: int = 0
    """Kept for the record: a step draws no random numbers."""

    @model_validator(mode="after")
    def _one_rank(self) -> TrainerConfig:
        if self.ranks > 1 and (self.scalar or self.frozen):
            raise ValueError("critics, reward models and frozen models are held by one rank; set ranks = 1")
        return self


@dataclass(frozen=True, slots=True)
class Location:
    """A folder to save to or to load from. ``optimizer``: with the optimiser's state. ``background``: answer as
    soon as a copy is taken, and write that while other requests are worked on.
    """

    path: str
    optimizer: bool = True
    background: bool = False


@dataclass(frozen=True, slots=True)
class Share:
    """Threads and processor numbers that the trainer may use from now on."""

    threads: int
    cores: tuple[int, ...] = ()


class TrainerService:
    """What the role answers. One request at a time is worked on; others wait in line."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="trainer-writes")
        self._writing: asyncio.Future[None] | None = None
        self._trainer: Any = None

    async def _do(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _call(self, method: Callable[..., Awaitable[T]], *arguments: Any, **named: Any) -> T:
        if self._writing is not None and self._writing.done():
            await self.settle()
        return await self._do(lambda: complete(method(*arguments, **named)))

    async def open(self) -> None:
        """Load the model. Called before the first request."""

        def load() -> Any:
            from lehr.model.memory import keep_freed_memory
            from lehr.model.tokenizer import load_tokenizer
            from lehr.train.scorer import FrozenModel
            from lehr.train.trainer import LocalTrainer

            keep_freed_memory()
            folder = Path(self._config.model)
            if self._config.frozen:
                return FrozenModel.open(folder, self._config.train, scalar=self._config.scalar)
            publish_to = Path(self._config.publish_to) if self._config.publish_to else None
            if self._config.ranks > 1:
                from lehr.train.gang import GangTrainer

                return GangTrainer(folder, self._config.train, ranks=self._config.ranks, publish_to=publish_to)
            return LocalTrainer.open(
                folder,
                self._config.train,
                publish_to=publish_to,
                tokenizer=load_tokenizer(folder),
                scalar=self._config.scalar,
            )

        if self._trainer is None:
            self._trainer = await self._do(load)

    async def step(self, batch: Batch) -> StepResult:
        """Take one optimiser step."""
        return await self._call(self._trainer.step, batch)

    async def score(self, samples: tuple[Sample, ...]) -> list[NDArray[np.float32]]:
        """Return what the model says of samples."""
        return await self._call(self._trainer.score, samples)

    async def evaluate(self, batch: Batch) -> StepResult:
        """Return the loss of samples that are not trained on."""
        return await self._call(self._trainer.evaluate, batch)

    async def publish(self, version: Version) -> Manifest:
        """Write the current weights for engines."""
        return await self._call(self._trainer.publish, version)

    async def save(self, location: Location) -> None:
        """Write a Hugging Face folder, one at a time."""
        await self.settle()
        path, resumable = Path(location.path), location.optimizer
        if not location.background:
            return await self._call(self._trainer.save, path, resumable=resumable)
        write = await self._do(lambda: self._trainer.snapshot(path, resumable=resumable))
        self._writing = asyncio.get_running_loop().run_in_executor(self._writer, write)

    async def settle(self) -> None:
        """Return when what is being written in the background is there. Its failure is raised here, or by the
        next request of whatever kind, once.
        """
        writing = self._writing
        if writing is None:
            return
        try:
            await asyncio.shield(writing)
        finally:
            if writing.done() and self._writing is writing:
                self._writing = None

    async def load(self, location: Location) -> None:
        """Go on from a saved folder."""
        await self._call(self._trainer.load, Path(location.path), optimizer=location.optimizer)

    async def reset(self, config: TrainConfig) -> None:
        """Start a new stage on the same weights."""
        await self._call(self._trainer.reset, config)

    async def allot(self, share: Share) -> None:
        """Use these threads and cores from the next step on."""
        await self._call(self._trainer.allot, share.threads, share.cores)

    async def close(self) -> None:
        """Remove published weights, finish what is being written, and end the threads."""
        if self._trainer is not None:
            await self._call(self._trainer.close)
        if self._writing is not None:
            await asyncio.wait([self._writing])
        self._thread.shutdown(wait=False)
        self._writer.shutdown(wait=False)


def complete(work: Awaitable[T]) -> T:
    """Run a coroutine that never waits for anything to its end."""
    steps = work.__await__()
    try:
        next(steps)
    except StopIteration as done:
        return done.value
    raise RuntimeError("a trainer's method waited for something")


async def build(config: dict[str, Any]) -> TrainerService:
    """Build the service from the plain values of :class:`TrainerConfig`."""
    service = TrainerService(TrainerConfig.model_validate(config))
    await service.open()
    return service
