"""After a sync, what the sampler recorded is what the trainer computes: rollouts of the real loop, all kinds of
domains, tools and boxes included.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lehr.core.batch import Batch, Sample
from lehr.core.trace import Sampling, Version
from lehr.domains.catalogue import open_domain
from lehr.engine.local import open_engine
from lehr.engine.native.settings import NativeConfig
from lehr.model.checkpoint import save_model
from lehr.model.tiny import tiny_decoder
from lehr.model.tokenizer import ByteTokenizer
from lehr.pipeline.beside import over_tokens
from lehr.pipeline.models import load_renderer
from lehr.pipeline.samples import cut
from lehr.rollout.agent import AgentLoop
from lehr.rollout.group import GroupPlan, GroupRunner
from lehr.sandbox.pool import Pool
from lehr.train.base import TrainConfig
from lehr.train.scorer import FrozenModel
from lehr.train.trainer import LocalTrainer

DOMAINS = ("code/functions", "documents/invoices", "terminal/files", "reasoning/chain_sum")


async def rollouts(folder: Path, temperature: float, dtype: str) -> tuple[Sample, ...]:
    engine = open_engine(folder, NativeConfig(dtype=dtype), Version(1, 0))
    pool = Pool("bwrap", warm=0, limit=4)
    runner = GroupRunner(AgentLoop(engine, load_renderer(folder), pool, context_tokens=2048), pool)
    try:
        groups = []
        for name in DOMAINS:
            domain = open_domain(name, ())
            sampling = Sampling(temperature=temperature)
            plan = GroupPlan(f"{name}-0", domain, domain.problem("train", 0), 3, sampling, 7)
            groups.append(await runner.run(plan))
    finally:
        await engine.close()
        await pool.close()
    random = np.random.default_rng(0)
    return tuple(
        replace(s, advantages=np.where(s.own, random.choice([-1.0, 1.0]), 0).astype(np.float32))
        for s in cut(groups)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_model(tiny_decoder(seed=0), path, ByteTokenizer())
    return path


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_r1_in_float32_the_ratio_of_the_first_step_is_one_and_its_divergence_zero(
    folder: Path, temperature: float
):
    samples = asyncio.run(rollouts(folder, temperature, "float32"))
    assert {s.domain for s in samples} == set(DOMAINS)
    trainer = LocalTrainer.open(folder, TrainConfig(dtype="float32", policy_loss="ppo_clip"))
    references = asyncio.run(FrozenModel.open(folder, TrainConfig(dtype="float32")).score(samples))
    for sample, values in zip(samples, references, strict=True):
        change = (values - sample.logprobs[sample.own]).astype(np.float64)
        assert np.abs(np.expm1(change)).max() < 1e-4, sample.domain
        assert np.abs(np.expm1(change) - change).max() < 1e-4
    scored = tuple(replace(s, reference=over_tokens(s, r)) for s, r in zip(samples, references, strict=True))
    metrics = asyncio.run(trainer.step(Batch(1, "policy_gradient", scored))).metrics
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4) and metrics["ratio"] == pytest.approx(1, abs=1e-4)
    assert metrics["reference_kl"] < 1e-6 and metrics["mismatch_kl"] < 1e-6
    assert metrics["clipped_up"] == metrics["clipped_down"] == 0.0
    for domain in DOMAINS:
        assert metrics[f"mismatch_abs/{domain}"] < 1e-4


def test_in_bfloat16_sampler_and_trainer_disagree_by_little_in_every_domain(folder: Path):
    samples = asyncio.run(rollouts(folder, 1.0, "bfloat16"))
    trainer = LocalTrainer.open(folder, TrainConfig(dtype="bfloat16"))
    metrics = asyncio.run(trainer.step(Batch(1, "policy_gradient", samples))).metrics
    for domain in DOMAINS:
        assert 0 < metrics[f"mismatch_abs/{domain}"] <= 0.01
        assert metrics[f"mismatch_abs_p99/{domain}"] <= 0.05
