"""After a sync, what the sampler recorded is what the trainer computes: rollouts of the real loop in every
built-in domain, tools and boxes included.
"""

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from first_step import DOMAINS, changes, rollouts

from lehr.core.batch import Batch
from lehr.model.checkpoint import save_model
from lehr.model.tiny import tiny_decoder
from lehr.model.tokenizer import ByteTokenizer
from lehr.pipeline.beside import over_tokens
from lehr.train.base import TrainConfig
from lehr.train.scorer import FrozenModel
from lehr.train.trainer import LocalTrainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    save_model(tiny_decoder(seed=0), path, ByteTokenizer())
    return path


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_r1_in_float32_the_ratio_of_the_first_step_is_one_and_its_divergence_zero(
    folder: Path, temperature: float
):
    samples = asyncio.run(rollouts(folder, "float32", temperature))
    trainer = LocalTrainer.open(folder, TrainConfig(dtype="float32", policy_loss="ppo_clip"))
    references = asyncio.run(FrozenModel.open(folder, TrainConfig(dtype="float32")).score(samples))
    found = changes(samples, references)
    assert tuple(sorted(found)) == DOMAINS and len(DOMAINS) >= 11
    for domain, change in found.items():
        assert len(change) >= 30, domain
        assert np.abs(np.expm1(change)).max() < 1e-4, domain
        assert np.abs(np.expm1(change) - change).max() < 1e-4, domain
    scored = tuple(replace(s, reference=over_tokens(s, r)) for s, r in zip(samples, references, strict=True))
    metrics = asyncio.run(trainer.step(Batch(1, "policy_gradient", scored))).metrics
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-4) and metrics["ratio"] == pytest.approx(1, abs=1e-4)
    assert metrics["reference_kl"] < 1e-6 and metrics["mismatch_kl"] < 1e-6
    assert metrics["clipped_up"] == metrics["clipped_down"] == 0.0
    for domain in DOMAINS:
        assert metrics[f"mismatch_abs_max/{domain}"] < 1e-4 and metrics[f"mismatch_kl/{domain}"] < 1e-6


def test_in_bfloat16_sampler_and_trainer_disagree_by_little_in_every_domain(folder: Path):
    samples = asyncio.run(rollouts(folder, "bfloat16"))
    trainer = LocalTrainer.open(folder, TrainConfig(dtype="bfloat16"))
    metrics = asyncio.run(trainer.step(Batch(1, "policy_gradient", samples))).metrics
    for domain in DOMAINS:
        assert 0 < metrics[f"mismatch_kl/{domain}"] <= 0.01
        assert 0 < metrics[f"mismatch_abs/{domain}"] <= 0.01
        assert metrics[f"mismatch_abs_p50/{domain}"] <= metrics[f"mismatch_abs_p99/{domain}"] <= 0.05
