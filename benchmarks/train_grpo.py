"""One step of reinforcement learning.

``train.grpo_step``: one whole step of reinforcement learning on the default model, 8 prompts with 8 completions
each of up to 32 tokens: sampling, rewards, one optimiser step, and the new weights in force in the engine.
Peer: TRL's ``GRPOTrainer`` on the same prompts, dtype and threads. Both run in processes of their own and take
turns, so that neither has a quieter machine.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.row import Row
from benchmarks.workers import Worker, trl_python

HERE = Path(__file__).parent
PROMPTS, GROUP, NEW_TOKENS = 8, 8, 32
ROUNDS = 3


def rows() -> Iterator[Row]:
    """Yield ``train.grpo_step``."""
    from lehr.model.dtype import compute_dtype, dtype_name
    from lehr.model.fetch import fetch

    job = {
        "model": str(fetch("smollm2-135m")),
        "prompts": prompts(),
        "group": GROUP,
        "new_tokens": NEW_TOKENS,
        "dtype": dtype_name(compute_dtype()),
        "threads": len(os.sched_getaffinity(0)),
    }
    rounds = int(os.environ.get("BENCH_ROUNDS", ROUNDS))
    ours = Worker([sys.executable, "-m", "benchmarks.train_grpo"], job)
    peer = Worker([str(trl_python()), str(HERE / "peers" / "trl_grpo.py")], job)
    try:
        times: dict[str, list[float]] = {"ours": [], "peer": []}
        for number in range(rounds + 1):
            for name, worker in (("ours", ours), ("peer", peer)):
                answer = worker.go()
                print(f"    {name}: {json.dumps(answer)}", file=sys.stderr, flush=True)
                if number:  # the first step warms up
                    times[name].append(answer["seconds"])
    finally:
        ours.close()
        peer.close()
    mine, theirs = (statistics.median(times[name]) for name in ("ours", "peer"))
    yield Row.duration("train.grpo_step", mine, "s", f"trl {peer.ready['ready']} {job['dtype']}", theirs)


def prompts() -> list[str]:
    """Return prompts of about 20 tokens, whose answers are long."""
    from benchmarks.prompts import chat_prompts

    begin = ("Tell me a long story about", "Explain in great detail", "Describe step by step, at length,")
    found = []
    for number, text in enumerate(chat_prompts(PROMPTS, seed=5)):
        words = " ".join(text.split()[5:15])
        found.append(f"{begin[number % len(begin)]} {words}")
    return found


async def _ours() -> None:
    """Our side: engine and trainer, taking turns as at staleness bound 0."""
    import tempfile

    import torch

    import lehr
    from lehr.core.trace import Version
    from lehr.engine.local import open_engine
    from lehr.engine.native.settings import NativeConfig
    from lehr.model.memory import keep_freed_memory
    from lehr.model.tokenizer import load_tokenizer
    from lehr.train.base import TrainConfig
    from lehr.train.trainer import LocalTrainer

    job = json.loads(sys.stdin.readline())
    torch.set_num_threads(job["threads"])
    keep_freed_memory()
    folder = Path(job["model"])
    shared = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(dir=shared) as weights:
        engine = open_engine(folder, NativeConfig(dtype=job["dtype"]), Version(1, 0))
        config = TrainConfig(learning_rate=1e-6, dtype=job["dtype"])
        trainer = LocalTrainer.open(folder, config, publish_to=Path(weights))
        tokenizer = load_tokenizer(folder)
        encoded = [tokenizer.encode(text) for text in job["prompts"]]
        print(
            json.dumps({"ready": getattr(lehr, "__version__", "here"), "torch": torch.__version__}), flush=True
        )
        for number, _ in enumerate(sys.stdin, start=1):
            began, cpu = time.perf_counter(), time.process_time()
            tokens, parts = await _step(number, job, engine, trainer, tokenizer, encoded)
            spent = {
                "seconds": time.perf_counter() - began,
                "cpu_s": time.process_time() - cpu,
                "tokens": tokens,
            }
            print(json.dumps(spent | parts), flush=True)


async def _step(
    number: int, job: dict[str, Any], engine: Any, trainer: Any, tokenizer: Any, encoded: list[list[int]]
) -> tuple[int, dict[str, float]]:
    import numpy as np

    from lehr.core.batch import Batch, Sample
    from lehr.core.trace import Sampling, Version
    from lehr.train.advantages import group_advantages

    marks = [time.perf_counter()]
    sampling = Sampling(temperature=1.0, max_tokens=job["new_tokens"])
    wanted = [prompt for prompt in encoded for _ in range(job["group"])]
    done = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in wanted))
    marks.append(time.perf_counter())
    samples = []
    for first in range(0, len(done), job["group"]):
        members = done[first : first + job["group"]]
        rewards = [float(sum(map(ord, tokenizer.decode(m.tokens.tolist()))) % 2) for m in members]
        if len(set(rewards)) == 1:  # the peer trains such groups too; give both the same work
            rewards[0] = 1 - rewards[0]
        for member, advantage in zip(members, group_advantages(rewards), strict=True):
            prompt, length = wanted[first], len(member.tokens)
            own = np.arange(len(prompt) + length) >= len(prompt)
            values = np.zeros((2, len(own)), np.float32)
            values[0, own], values[1, own] = member.raw_logprobs, advantage
            ids = np.concatenate([np.asarray(prompt, np.int32), member.tokens])
            samples.append(Sample(ids, own, values[0], values[1], prefix=str(first)))
    result = await trainer.step(Batch(number, "policy_gradient", tuple(samples)))
    marks.append(time.perf_counter())
    version = Version(1, number)
    await engine.fetch(await trainer.publish(version))
    await engine.activate(version)
    marks.append(time.perf_counter())
    spent = [round(b - a, 2) for a, b in itertools.pairwise(marks)]
    parts = dict(zip(("sample_s", "train_s", "sync_s"), spent, strict=True))
    return sum(len(m.tokens) for m in done), parts | {"ratio_max": result.metrics["ratio_max"]}


if __name__ == "__main__":
    asyncio.run(_ours())
