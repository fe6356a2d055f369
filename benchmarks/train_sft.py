"""Supervised steps on the default model: 8 examples of 96 to 480 tokens, loss on the answers.

``train.sft_tokens_per_s``: tokens of the examples, padding not counted, per second of a whole optimiser step.
Peer: TRL's ``SFTTrainer``, on the same batch as one forward and backward, in the faster of mixed precision and
pure bfloat16.
``train.peak_memory``: most memory of the process during a step, beside TRL with float32 weights and optimiser
and bfloat16 products, which is what ours holds.
``train.matmul_share``: the part of the measured matrix peak that a step reaches. Counted are the products of
the model alone (layers on every token that is computed, attention on visible pairs, head on loss tokens; three
times for forward and backward), nothing that is computed again; the peak is the best of large products in the
same process. Beside it the same of TRL's step, to whose products no padding is counted either.

Each runs in a process of its own, one after the other: together they would not fit into memory.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.row import Row
from benchmarks.workers import HERE, Worker, forget_peak, peak_bytes, trl_python

EXAMPLES, ROUNDS = 8, 3


def rows() -> Iterator[Row]:
    """Yield the rows, in the order of the module's docstring."""
    from lehr.model.dtype import compute_dtype, dtype_name
    from lehr.model.fetch import fetch

    dtype = dtype_name(compute_dtype())
    job = {"model": str(fetch("smollm2-135m")), "examples": examples(), "dtype": dtype}
    job["threads"] = len(os.sched_getaffinity(0))
    commands = {"ours": [sys.executable, "-m", "benchmarks.train_sft"]}
    for precision in ("mixed", "bfloat16") if dtype == "bfloat16" else ("float32",):
        commands[precision] = [str(trl_python()), str(HERE / "peers" / "trl_sft.py")]
    ready: dict[str, dict[str, Any]] = {}
    answers: dict[str, list[dict[str, Any]]] = {}
    for side, command in commands.items():
        worker = Worker(command, job | {"precision": side})
        try:
            ready[side] = worker.ready
            for number in range(int(os.environ.get("BENCH_ROUNDS", ROUNDS)) + 1):
                answer = worker.go()
                print(f"    {side}: {json.dumps(answer)}", file=sys.stderr, flush=True)
                if number:  # the first step warms up
                    answers.setdefault(side, []).append(answer)
        finally:
            worker.close()
    took = {side: statistics.median(a["seconds"] for a in found) for side, found in answers.items()}
    tokens = answers["ours"][0]["tokens"]
    best = min((side for side in took if side != "ours"), key=lambda side: took[side])
    trl = f"trl {ready[best]['ready']}"
    yield Row.throughput(
        "train.sft_tokens_per_s", tokens / took["ours"], "/s", f"{trl} {best}", tokens / took[best]
    )
    equal = next(side for side in ready if side != "ours")
    memory = {side: max(a["peak"] for a in answers[side]) / 2**20 for side in ("ours", equal)}
    yield Row.duration("train.peak_memory", memory["ours"], "MiB", f"{trl} {equal}", memory[equal])
    peak = ready["ours"]["peak_gflops"]
    share = {side: 100 * ready["ours"]["gflop"] / seconds / peak for side, seconds in took.items()}
    print(f"    the peak is {peak:.0f} GFLOP/s", file=sys.stderr)
    yield Row.throughput("train.matmul_share", share["ours"], "%", f"{trl} {best}", share[best])


def examples(seed: int = 0) -> list[dict[str, Any]]:
    """Return examples of random ids: ``prompt`` tokens without loss, then the answer."""
    import numpy as np

    random = np.random.default_rng(seed)
    lengths = [(int(random.integers(32, 160)), int(random.integers(64, 320))) for _ in range(EXAMPLES)]
    return [{"prompt": p, "tokens": random.integers(1000, 40000, p + a).tolist()} for p, a in lengths]


def model_gflop(config: Any, batch: Any) -> float:
    """Return 10⁹ floating-point operations of the model's products in one step over ``batch``."""
    c, gflop = config, 0.0
    width = c.q_size + 2 * c.kv_size
    layer = c.hidden_size * (width + c.q_size + 3 * c.intermediate_size)
    for sample in batch.samples:
        last = int(sample.own.nonzero()[0][-1])
        pairs = last * (last + 1) / 2
        gflop += 6e-9 * c.num_layers * (last * layer + 2 * pairs * c.q_size)
        gflop += 6e-9 * int(sample.own.sum()) * c.vocab_size * c.hidden_size
    return gflop


def matrix_peak(dtype: Any) -> float:
    """Return the best rate of large products, in GFLOP/s."""
    import torch

    best = 0.0
    for size in (2048, 4096):
        a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
        for _ in range(6):
            start = time.perf_counter()
            torch.mm(a, b)
            best = max(best, 2e-9 * size**3 / (time.perf_counter() - start))
    return best


def sft_batch(job: dict[str, Any]) -> Any:
    """Return the job's examples as one batch."""
    import numpy as np

    from lehr.core.batch import Batch, Sample

    samples: list[Sample] = []
    for example in job["examples"]:
        ids = np.asarray(example["tokens"], np.int32)
        zeros = np.zeros(len(ids), np.float32)
        samples.append(Sample(ids, np.arange(len(ids)) >= example["prompt"], zeros, zeros))
    return Batch(0, "sft", tuple(samples))


def _ours() -> None:
    import torch

    from lehr.model.dtype import compute_dtype
    from lehr.model.memory import keep_freed_memory
    from lehr.train.base import TrainConfig
    from lehr.train.trainer import LocalTrainer

    job = json.loads(sys.stdin.readline())
    torch.set_num_threads(job["threads"])
    peak = matrix_peak(compute_dtype(job["dtype"]))
    keep_freed_memory()
    trainer = LocalTrainer.open(Path(job["model"]), TrainConfig(learning_rate=1e-6, dtype=job["dtype"]))
    batch = sft_batch(job)
    gflop = model_gflop(trainer.master.config, batch)
    print(json.dumps({"ready": "lehr", "gflop": gflop, "peak_gflops": peak}), flush=True)
    for _ in sys.stdin:
        forget_peak()
        began, cpu = time.perf_counter(), time.process_time()
        asyncio.run(trainer.step(batch))
        spent = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
        tokens = sum(len(s.tokens) for s in batch.samples)
        print(json.dumps(spent | {"tokens": tokens, "peak": peak_bytes()}), flush=True)


if __name__ == "__main__":
    _ours()
