"""What a long trace with few own tokens takes to train on.

``train.own_token_memory``: most memory of a step over one trace of 2,048 tokens of which the last 100 are own,
above that of a step over a trace of 16 tokens (which is what weights, optimiser and libraries take). Measured
at 100, 400 and 1,600 own tokens: logits exist for own tokens only, and no more at a time than one chunk.
Peer: TRL's ``SFTTrainer`` on the same traces, in the same precision of weights and optimiser.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.row import Row
from benchmarks.workers import Worker, trl_python

HERE = Path(__file__).parent
TOKENS, OWN, SHORT = 2048, (100, 400, 1600), 16


def rows() -> Iterator[Row]:
    """Yield ``train.own_token_memory``."""
    from lehr.model.dtype import compute_dtype, dtype_name
    from lehr.model.fetch import fetch

    dtype = dtype_name(compute_dtype())
    job = {"model": str(fetch("smollm2-135m")), "dtype": dtype, "threads": len(os.sched_getaffinity(0))}
    job["precision"] = "mixed" if dtype == "bfloat16" else dtype
    ours = [sys.executable, "-m", "benchmarks.train_sft"]
    trl = [str(trl_python()), str(HERE / "peers" / "trl_sft.py")]
    base, taken = _peak("ours", ours, job, SHORT, SHORT // 2), dict[int, float]()
    for own in OWN:
        taken[own] = _peak("ours", ours, job, TOKENS, own) - base
    peer = _peak("trl", trl, job, TOKENS, OWN[0]) - _peak("trl", trl, job, SHORT, SHORT // 2)
    grows = ", ".join(f"{size:.0f} MiB with {own}" for own, size in taken.items())
    print(f"    {TOKENS} tokens take {grows} own ones", file=sys.stderr)
    yield Row.duration("train.own_token_memory", taken[OWN[0]], "MiB", f"trl {job['precision']}", peer)


def _peak(side: str, command: list[str], job: dict[str, Any], tokens: int, own: int) -> float:
    """Return the most MiB that the process holds during a step. The peer makes its moments in a first one."""
    import numpy as np

    ids = np.random.default_rng(0).integers(1000, 40000, tokens).tolist()
    worker = Worker(command, job | {"examples": [{"prompt": tokens - own, "tokens": ids}]})
    try:
        if side != "ours":
            worker.go()
        peak = worker.go()["peak"] / 2**20
    finally:
        worker.close()
    print(f"    {side}: {peak:.0f} MiB with {tokens} tokens, {own} of them own", file=sys.stderr, flush=True)
    return peak
