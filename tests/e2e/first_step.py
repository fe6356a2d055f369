"""What the sampler records beside what the trainer computes from the same weights, in every built-in domain.

    python tests/e2e/first_step.py [MODEL|FOLDER] [float32|bfloat16]

samples a group of each domain's attempts and prints, per domain and in nats, how the distances of the tokens'
log-probabilities are distributed. The tests beside it hold them to their bounds on the tiny model.
"""

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lehr.core.batch import Sample
from lehr.core.trace import Sampling, Version
from lehr.domains.card import BUILT_IN
from lehr.domains.catalogue import find_domains, open_domain
from lehr.engine.local import open_engine
from lehr.engine.native.settings import NativeConfig
from lehr.pipeline.models import load_renderer
from lehr.pipeline.samples import cut
from lehr.rollout.agent import AgentLoop
from lehr.rollout.group import GroupPlan, GroupRunner
from lehr.sandbox.pool import Pool
from lehr.train.base import TrainConfig
from lehr.train.scorer import FrozenModel

DOMAINS = tuple(sorted(n for n, d in find_domains().items() if d.folder.is_relative_to(BUILT_IN)))
CONTEXT_TOKENS = 16384
"""What the longest tasks take in bytes."""


async def rollouts(
    folder: Path, dtype: str, temperature: float = 1.0, members: int = 3, new_tokens: int = 64
) -> tuple[Sample, ...]:
    """Return the samples of one group per domain, tools and boxes included; each of advantage 1 or -1."""
    engine = open_engine(folder, NativeConfig(dtype=dtype), Version(1, 0))
    pool = Pool("bwrap", warm=0, limit=4)
    loop = AgentLoop(engine, load_renderer(folder), pool, context_tokens=CONTEXT_TOKENS)
    runner = GroupRunner(loop, pool)
    try:
        groups = []
        for name in DOMAINS:
            domain = open_domain(name, ())
            sampling = Sampling(temperature=temperature, max_tokens=new_tokens)
            plan = GroupPlan(f"{name}-0", domain, domain.problem("train", 0), members, sampling, 7)
            groups.append(await runner.run(plan))
    finally:
        await engine.close()
        await pool.close()
    random = np.random.default_rng(0)
    return tuple(
        replace(s, advantages=np.where(s.own, random.choice([-1.0, 1.0]), 0).astype(np.float32))
        for s in cut(groups)
    )


def changes(samples: Sequence[Sample], scores: Sequence[NDArray[np.float32]]) -> dict[str, NDArray[np.float64]]:
    """Return, per domain, log(trainer / sampler) of every own token."""
    found: dict[str, list[NDArray[np.float64]]] = {}
    for sample, values in zip(samples, scores, strict=True):
        found.setdefault(sample.domain, []).append((values - sample.logprobs[sample.own]).astype(np.float64))
    return {domain: np.concatenate(parts) for domain, parts in found.items()}


def main(model: str = "smollm2-135m", dtype: str = "float32") -> None:
    """Print the table."""
    from lehr.model.fetch import fetch

    folder = Path(model) if Path(model).is_dir() else fetch(model)
    samples = asyncio.run(rollouts(folder, dtype))
    scores = asyncio.run(FrozenModel.open(folder, TrainConfig(dtype=dtype)).score(samples))
    print(f"{'domain':<32}{'tokens':>7}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}{'KL (k3)':>10}")
    for domain, change in changes(samples, scores).items():
        spread = np.quantile(np.abs(change), (0.5, 0.9, 0.99, 1.0))
        divergence = (np.expm1(change) - change).mean()
        numbers = (np.abs(change).mean(), *spread, divergence)
        print(f"{domain:<32}{len(change):>7}" + "".join(f"{value:>10.2g}" for value in numbers))


if __name__ == "__main__":
    main(*sys.argv[1:])
