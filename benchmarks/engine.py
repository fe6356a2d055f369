"""Benchmarks of sampling.

``engine.decode.b1``, ``.b16``, ``.b64``: as many different chat prompts, 48 new tokens each at temperature 1,
prompts included in the time. Ours: engines as a run starts them, one per core; for a single prompt one engine
on all cores. Peers: ``transformers`` generation of the same prompts as one left-padded batch, and vLLM on a
CPU where its environment is, compiled and warm, its prefix cache emptied between rounds; in the same dtype,
with as many threads, a row for each. Each runs in a process of its own and they take turns. The share of the
measured matrix peak that our multiply-adds reach is printed beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.row import Row
from benchmarks.workers import Worker, environment

from lehr.cluster.local import LocalCluster
from lehr.engine.router import Router
from lehr.pipeline.sampler import start_engines

HERE = Path(__file__).parent
PINS = ("transformers==5.24.0", "torch==2.13.0")
NEW_TOKENS, ROUNDS = 48, 3
BATCHES: tuple[tuple[int, int | None], ...] = ((1, 1), (16, None), (64, None))
"""Prompts at once, and how many engines serve them (None: as many as a run starts)."""


def rows() -> Iterator[Row]:
    """Yield the rows, in the order of the module's docstring."""
    from lehr.model.dtype import compute_dtype, dtype_name
    from lehr.model.fetch import fetch

    folder = fetch("smollm2-135m")
    prompts = _encoded(folder)
    for batch, engines in BATCHES:
        job = {
            "model": str(folder),
            "prompts": prompts[:batch],
            "new_tokens": NEW_TOKENS,
            "dtype": dtype_name(compute_dtype()),
            "threads": len(os.sched_getaffinity(0)),
            "engines": engines,
        }
        yield from _decode(f"engine.decode.b{batch}", job)


def _decode(name: str, job: dict[str, Any]) -> Iterator[Row]:
    """Run all sides in turns and return a row of medians for each peer."""
    sides = {"ours": Worker([sys.executable, "-m", "benchmarks.engine"], job)}
    answers: dict[str, list[dict[str, Any]]] = {}
    try:
        for peer, python in _peers().items():
            sides[peer] = Worker([str(python), str(HERE / "peers" / f"{peer}_generate.py")], job)
        for _ in range(int(os.environ.get("BENCH_ROUNDS", ROUNDS))):
            for side, worker in sides.items():
                answers.setdefault(side, []).append(worker.go())
                print(f"    {side}: {json.dumps(answers[side][-1])}", file=sys.stderr, flush=True)
    finally:
        for worker in sides.values():
            worker.close()
    rate = {
        side: statistics.median(a["tokens"] / a["seconds"] for a in found) for side, found in answers.items()
    }
    reached = statistics.median(a["gflops"] / a["seconds"] for a in answers["ours"])
    peak = sides["ours"].ready["peak_gflops"]
    print(
        f"    {reached:.0f} of {peak:.0f} GFLOP/s that one large product reaches, {reached / peak:.0%}",
        file=sys.stderr,
    )
    for peer, worker in sides.items():
        if peer != "ours":
            what = f"{peer} {worker.ready['ready']} {job['dtype']}"
            yield Row.throughput(name, rate["ours"], "tokens/s", what, rate[peer])


def _peers() -> dict[str, Path]:
    """Return the interpreter of each peer's environment."""
    found = {"transformers": environment("transformers", PINS)}
    vllm = Path(os.environ.get("LEHR_VLLM_PYTHON") or HERE.parent / ".venv-vllm" / "bin" / "python").absolute()
    if vllm.exists():
        found["vllm"] = vllm
    else:
        print(
            "    vLLM is not measured: make test-vllm makes its environment, 3.5 GB",
            file=sys.stderr,
            flush=True,
        )
    return found


def _encoded(folder: Path) -> list[list[int]]:
    from benchmarks.prompts import chat_prompts

    from lehr.core.task import Message
    from lehr.model.chat import ChatRenderer
    from lehr.model.tokenizer import load_tokenizer

    renderer = ChatRenderer(load_tokenizer(folder))
    return [
        renderer.start((Message(role="user", content=text),))
        for text in chat_prompts(max(batch for batch, _ in BATCHES))
    ]


async def _ours() -> None:
    """Our side: the same exchange of lines as the peer's. Engines as a run starts them, anew for each round so
    that nothing is cached.
    """
    from lehr.engine.native.settings import NativeConfig
    from lehr.model.checkpoint import load_decoder
    from lehr.model.dtype import compute_dtype

    job = json.loads(sys.stdin.readline())
    dtype = compute_dtype(job["dtype"])
    shape = load_decoder(Path(job["model"]), dtype)
    layers = sum(p.numel() for name, p in shape.to_hf().items() if "layers" in name)
    head = shape.config.vocab_size * shape.config.hidden_size
    print(json.dumps({"ready": "lehr", "peak_gflops": _peak(dtype)}), flush=True)
    config = NativeConfig(max_running=len(job["prompts"]), token_budget=8192, dtype=job["dtype"])
    for _ in sys.stdin:
        with tempfile.TemporaryDirectory() as scratch:
            cluster = LocalCluster(Path(scratch))
            try:
                engine = await start_engines(cluster, Path(job["model"]), config, job["engines"], incarnation=1)
                answer = await _round(engine, job)
            finally:
                await cluster.close()
        computed, sampled = answer.pop("computed"), answer["tokens"]
        answer["gflops"] = 2e-9 * (layers * computed + head * sampled)
        print(json.dumps(answer), flush=True)


async def _round(engine: Router, job: dict[str, Any]) -> dict[str, float]:
    from lehr.core.trace import Sampling

    warm = [[200 + n] * 4 for n in range(8)]
    await asyncio.gather(*(engine.generate(prompt, Sampling(max_tokens=2)) for prompt in warm))
    before = await engine.stats()
    start = time.perf_counter()
    sampling = Sampling(max_tokens=job["new_tokens"])
    done = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in job["prompts"]))
    spent = time.perf_counter() - start
    after = await engine.stats()
    sampled = sum(len(completion.tokens) for completion in done)
    prompts = after.prompt_tokens - before.prompt_tokens - (after.cached_tokens - before.cached_tokens)
    return {"seconds": spent, "tokens": sampled, "computed": prompts + sampled - len(done)}


def _peak(dtype: Any, size: int = 2048) -> float:
    """Return the best rate of one large product, in GFLOP/s."""
    import torch

    a, b = (torch.randn(size, size).to(dtype) for _ in range(2))
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2e-9 * size**3 / best


if __name__ == "__main__":
    asyncio.run(_ours())
