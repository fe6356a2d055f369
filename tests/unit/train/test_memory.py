"""What a step holds in memory, counted: every tensor that is made between its making and its end."""

import asyncio
import gc
import weakref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lehr.core.batch import Batch, Sample
from lehr.model.tiny import random_decoder, tiny_config
from lehr.train.base import TrainConfig
from lehr.train.head import CHUNK_BYTES
from lehr.train.trainer import LocalTrainer

TRACE, VOCABULARY = 2048, 16384
LOGITS = 4 * VOCABULARY
"""Bytes of the float32 logits of one token."""


class Held(TorchDispatchMode):
    """Counts the bytes of living storages that were made while it is on, and the most there were at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._end, key, size)

    def _end(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


async def held(own: int) -> int:
    """Return the most bytes that a step over a trace of 2,048 tokens made, ``own`` of them at the end."""
    config = tiny_config(vocab_size=VOCABULARY, num_layers=2)
    trainer = LocalTrainer(random_decoder(config, seed=1), TrainConfig(dtype="float32"))
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, TRACE).astype(np.int32)
    mask = np.arange(TRACE) >= TRACE - own
    sample = Sample(tokens, mask, np.where(mask, -9.7, 0).astype(np.float32), mask.astype(np.float32))
    gc.collect()
    with Held() as counted:
        await trainer.step(Batch(0, "policy_gradient", (sample,)))
    return counted.most


def test_memory_grows_with_own_tokens_and_not_with_the_trace() -> None:
    sizes = {own: asyncio.run(held(own)) for own in (100, 200, 400, 800, 2047)}
    assert sizes[100] < TRACE * LOGITS / 2, "the logits of the whole trace were made"
    for few, many in ((200, 400), (400, 800)):
        each = (sizes[many] - sizes[few]) / (many - few)
        assert each == pytest.approx(2 * LOGITS, rel=0.1), "two values of each logit at a time"
    assert sizes[2047] - sizes[800] < CHUNK_BYTES, "more than one chunk at a time"
