"""The trainer as the orchestrator sees it: every call goes to the role's process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lehr.core.batch import Batch, Manifest, Sample, StepResult
from lehr.core.trace import Version
from lehr.train.base import TrainConfig
from lehr.train.role import Location, Share


class Caller(Protocol):
    """What is needed of a started role; ``cluster.base.Handle`` is one."""

    async def call(self, method: str, body: Any = None, *, returns: Any = None, timeout_s: float = 60.0) -> Any:
        """Send a request and return its answer decoded as ``returns``."""
        ...


class RemoteTrainer:
    """Implements :class:`lehr.train.base.Trainer` through a role's handle.

    ``step_timeout_s`` bounds a step, ``io_timeout_s`` everything that writes or reads weights.
    """

    def __init__(self, handle: Caller, *, step_timeout_s: float = 1800.0, io_timeout_s: float = 300.0) -> None:
        self._handle = handle
        self._step_timeout_s = step_timeout_s
        self._io_timeout_s = io_timeout_s

    async def step(self, batch: Batch) -> StepResult:
        """See :meth:`lehr.train.base.Trainer.step`."""
        return await self._handle.call("step", batch, returns=StepResult, timeout_s=self._step_timeout_s)

    async def score(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """See :meth:`lehr.train.base.Trainer.score`."""
        found: list[NDArray[np.float32]] = await self._handle.call(
            "score", tuple(samples), returns=list[np.ndarray], timeout_s=self._step_timeout_s
        )
        return found

    async def evaluate(self, batch: Batch) -> StepResult:
        """See :meth:`lehr.train.base.Trainer.evaluate`."""
        return await self._handle.call("evaluate", batch, returns=StepResult, timeout_s=self._step_timeout_s)

    async def publish(self, version: Version) -> Manifest:
        """See :meth:`lehr.train.base.Trainer.publish`."""
        return await self._handle.call("publish", version, returns=Manifest, timeout_s=self._io_timeout_s)

    async def save(self, path: Path, *, resumable: bool = True, background: bool = False) -> None:
        """See :meth:`lehr.train.base.Trainer.save`. With ``background`` it returns when a copy is taken: the
        folder is there after :meth:`settle`, and steps may be taken before that. If it cannot be written, the
        next call says so.
        """
        location = Location(str(path), resumable, background)
        await self._handle.call("save", location, timeout_s=self._io_timeout_s)

    async def settle(self) -> None:
        """Wait until what :meth:`save` writes in the background is there, or raise why it is not."""
        await self._handle.call("settle", timeout_s=self._io_timeout_s)

    async def load(self, path: Path, *, optimizer: bool = True) -> None:
        """See :meth:`lehr.train.base.Trainer.load`."""
        await self._handle.call("load", Location(str(path), optimizer), timeout_s=self._io_timeout_s)

    async def reset(self, config: TrainConfig) -> None:
        """See :meth:`lehr.train.base.Trainer.reset`."""
        await self._handle.call("reset", config, timeout_s=self._io_timeout_s)

    async def allot(self, share: Share) -> None:
        """Give the trainer its threads and cores from the next step on."""
        await self._handle.call("allot", share, timeout_s=self._step_timeout_s)
