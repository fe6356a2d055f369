"""What laying a shared prompt out once is worth.

``train.prompt_sharing``: tokens per second, prompts counted once per sample, of a policy-gradient step over two
groups of 16 answers of 64 tokens to a prompt of 512. Peer: the same trainer on the same samples, told of no
common prefix. They take turns in one process.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from benchmarks.row import Row

GROUPS, GROUP, PROMPT, ANSWER, ROUNDS = 2, 16, 512, 64, 3


def rows() -> Iterator[Row]:
    """Yield ``train.prompt_sharing``."""
    import numpy as np
    import torch

    from lehr.core.batch import Batch, Sample
    from lehr.model.fetch import fetch
    from lehr.model.memory import keep_freed_memory
    from lehr.train.base import TrainConfig
    from lehr.train.trainer import LocalTrainer

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    keep_freed_memory()
    random = np.random.default_rng(0)
    samples: list[Sample] = []
    for group in range(GROUPS):
        prompt = random.integers(1000, 40000, PROMPT)
        for member in range(GROUP):
            ids = np.concatenate([prompt, random.integers(1000, 40000, ANSWER)]).astype(np.int32)
            own = np.arange(len(ids)) >= PROMPT
            values = np.zeros((2, len(ids)), np.float32)
            values[0, own], values[1, own] = -12.0, member % 2 - 0.5
            samples.append(Sample(ids, own, values[0], values[1], prefix=str(group)))
    shared = Batch(0, "policy_gradient", tuple(samples))
    apart = replace(shared, samples=tuple(replace(s, prefix="") for s in samples))
    trainer = LocalTrainer.open(fetch("smollm2-135m"), TrainConfig(learning_rate=1e-6))
    times: dict[str, list[float]] = {"shared": [], "apart": []}
    for number in range(int(os.environ.get("BENCH_ROUNDS", ROUNDS)) + 1):
        for name, batch in (("shared", shared), ("apart", apart)):
            began = time.perf_counter()
            asyncio.run(trainer.step(batch))
            spent = time.perf_counter() - began
            print(f"    {name}: {spent:.2f} s", file=sys.stderr, flush=True)
            if number:
                times[name].append(spent)
    tokens = sum(len(s.tokens) for s in samples)
    ours, peer = (tokens / statistics.median(found) for found in times.values())
    yield Row.throughput("train.prompt_sharing", ours, "tokens/s", "the same without sharing", peer)
