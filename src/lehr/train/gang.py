"""Several ranks behind the protocol of one trainer: rank 0 computes here, the others in processes of their own.

Orders travel through pipes, gradients over gloo on the loopback interface. A rank that is lost takes the gang
with it: the call fails with :class:`RoleLost`, and a new gang goes on from a checkpoint.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from lehr.core.batch import Batch, Manifest, Sample, StepResult
from lehr.core.errors import LehrError, RoleLost
from lehr.core.trace import Version
from lehr.model.tokenizer import load_tokenizer
from lehr.train.base import TrainConfig
from lehr.train.role import complete
from lehr.train.shards import ShardedTrainer
from lehr.train.trainer import LocalTrainer

WAIT_S = 1800.0
"""How long one rank waits for another in a collective, and this one for an answer."""


class GangTrainer:
    """Implements :class:`lehr.train.base.Trainer`. One at a time in a process; :meth:`close` ends the other
    ranks.
    """

    def __init__(
        self, folder: Path, config: TrainConfig | None = None, *, ranks: int, publish_to: Path | None = None
    ) -> None:
        self._meeting = Path(tempfile.mkdtemp(prefix="lehr-ranks-"))
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._lost = ""
        config = config or TrainConfig()
        threads = max(1, torch.get_num_threads() // ranks)
        context = multiprocessing.get_context("spawn")
        try:
            for rank in range(1, ranks):
                here, there = context.Pipe()
                arguments = (there, str(folder), config, rank, ranks, str(self._meeting / "store"), threads)
                process = context.Process(
                    target=_work, args=arguments, daemon=True, name=f"trainer-rank-{rank}"
                )
                process.start()
                there.close()
                self._pipes.append(here)
                self._processes.append(process)
            torch.set_num_threads(threads)
            _join(0, ranks, str(self._meeting / "store"))
            self.trainer = self._watched(
                lambda: ShardedTrainer.open(
                    folder, config, publish_to=publish_to, tokenizer=load_tokenizer(folder)
                )
            )
            self._answers()
        except BaseException:
            self._end()
            raise

    async def step(self, batch: Batch) -> StepResult:
        """See :meth:`lehr.train.base.Trainer.step`."""
        return self._all("step", batch)

    async def score(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """See :meth:`lehr.train.base.Trainer.score`."""
        return self._all("score", tuple(samples))

    async def evaluate(self, batch: Batch) -> StepResult:
        """See :meth:`lehr.train.base.Trainer.evaluate`."""
        return self._all("evaluate", batch)

    async def publish(self, version: Version) -> Manifest:
        """See :meth:`lehr.train.base.Trainer.publish`."""
        return self._all("publish", version)

    async def save(self, path: Path, *, resumable: bool = True) -> None:
        """See :meth:`lehr.train.base.Trainer.save`."""
        self._all("save", path, resumable=resumable)

    def snapshot(self, path: Path, *, resumable: bool = True) -> Callable[[], None]:
        """See :meth:`lehr.train.trainer.LocalTrainer.snapshot`."""
        return self._all("snapshot", path, resumable=resumable)

    async def load(self, path: Path, *, optimizer: bool = True) -> None:
        """See :meth:`lehr.train.base.Trainer.load`."""
        self._all("load", path, optimizer=optimizer)

    async def reset(self, config: TrainConfig) -> None:
        """See :meth:`lehr.train.base.Trainer.reset`."""
        self._all("reset", config)

    async def allot(self, threads: int, cores: Sequence[int] = ()) -> None:
        """Divide the threads between the ranks."""
        self._all("allot", max(1, threads // (1 + len(self._pipes))), cores)

    async def close(self) -> None:
        """Remove published weights and end the other ranks."""
        await self.trainer.close()
        self._end()

    def _all(self, method: str, *arguments: Any, **named: Any) -> Any:
        if self._lost:
            raise RoleLost(self._lost, hint="Resume the run: a new gang starts from the last checkpoint.")
        for rank, pipe in enumerate(self._pipes, 1):
            try:
                pipe.send((method, arguments, named))
            except OSError as error:
                raise self._gone(f"rank {rank} of the trainer has ended") from error
        try:
            result = self._watched(lambda: _call(self.trainer, method, arguments, named))
        except LehrError:
            self._answers(same=True)  # the others failed alike, and are ready for what comes next
            raise
        self._answers()
        return result

    def _watched(self, work: Callable[[], Any]) -> Any:
        try:
            return work()
        except LehrError:
            raise
        except RuntimeError as error:  # what gloo raises when a peer is gone or does not answer
            raise self._gone(f"the ranks of the trainer lost each other: {error}") from error

    def _answers(self, *, same: bool = False) -> None:
        for rank, pipe in enumerate(self._pipes, 1):
            try:
                said = pipe.recv() if pipe.poll(WAIT_S) else f"no answer within {WAIT_S:.0f} s"
            except (EOFError, OSError):
                said = "it has ended"
            if said and not same:
                raise self._gone(f"rank {rank} of the trainer: {said}")

    def _gone(self, what: str) -> RoleLost:
        self._lost = what
        self._end()
        return RoleLost(what, hint="Resume the run: a new gang starts from the last checkpoint.")

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join(5)
        self._pipes, self._processes = [], []
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        shutil.rmtree(self._meeting, ignore_errors=True)


def _join(rank: int, ranks: int, store: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=WAIT_S),
    )


def _call(trainer: LocalTrainer, method: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    found = getattr(trainer, method)(*arguments, **named)
    return complete(found) if hasattr(found, "__await__") else found


def _work(
    pipe: Connection, folder: str, config: TrainConfig, rank: int, ranks: int, store: str, threads: int
) -> None:
    """Do what rank 0 does until it closes the pipe. An answer is "" or what went wrong."""
    from lehr.model.memory import keep_freed_memory

    keep_freed_memory()
    torch.set_num_threads(threads)
    with contextlib.suppress(EOFError, OSError):
        try:
            _join(rank, ranks, store)
            trainer = ShardedTrainer.open(Path(folder), config)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
            return
        pipe.send("")
        while True:
            method, arguments, named = pipe.recv()
            try:
                _call(trainer, method, arguments, named)
            except Exception as error:
                pipe.send(f"{type(error).__name__}: {error}")
            else:
                pipe.send("")
