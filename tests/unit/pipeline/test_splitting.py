import asyncio

import numpy as np
import pytest
import torch

from lehr.core.batch import Batch, Sample
from lehr.model.tiny import tiny_decoder
from lehr.pipeline.recipe import LengthCurriculum, RlStage
from lehr.pipeline.splitting import split_samples
from lehr.rollout.replay import ReplayConfig
from lehr.train.base import TrainConfig
from lehr.train.trainer import LocalTrainer


def turns(*lengths: int, gap: int = 3) -> Sample:
    own = np.concatenate([np.r_[np.zeros(gap), np.ones(n)] for n in lengths]).astype(np.bool_)
    source = np.random.default_rng(0)
    tokens = source.integers(0, 256, len(own)).astype(np.int32)
    logprobs = np.where(own, -source.random(len(own), np.float32) - 4, 0).astype(np.float32)
    return Sample(
        tokens, own, logprobs, np.where(own, 0.5, 0).astype(np.float32), prefix="g", reference=logprobs
    )


def test_parts_end_between_turns_and_see_all_that_stood_before() -> None:
    whole = turns(4, 5, 6, 20)
    parts = split_samples([whole], 15)
    spans = [(int(np.flatnonzero(p.own)[0]), int(np.flatnonzero(p.own)[-1]) + 1) for p in parts]
    assert spans == [(3, 15), (18, 24), (27, 47)], (
        "two turns that fit, one alone, and one that is longer itself"
    )
    for part in parts:
        assert (part.tokens == whole.tokens[: len(part.tokens)]).all()
        assert (
            part.own[-1] and (part.logprobs[~part.own] == 0).all() and (part.advantages[~part.own] == 0).all()
        )
        assert part.reference is not None and (part.reference[part.own] == part.logprobs[part.own]).all()
    assert sum(int(p.own.sum()) for p in parts) == int(whole.own.sum())
    assert split_samples([whole], None) == split_samples([whole], 10**6) == (whole,)


def test_r11_a_step_on_the_parts_is_the_step_on_the_whole() -> None:
    config = TrainConfig(dtype="float32", learning_rate=1e-2)
    weights = []
    for limit in (None, 12):
        trainer = LocalTrainer(tiny_decoder(seed=1), config)

        result = asyncio.run(
            trainer.step(Batch(1, "policy_gradient", split_samples([turns(4, 5, 6, 4)], limit)))
        )
        weights.append((result.metrics["grad_norm"], trainer.master.state_dict()))
    assert weights[0][0] == pytest.approx(weights[1][0], rel=1e-4)
    for name, value in weights[0][1].items():
        torch.testing.assert_close(value, weights[1][1][name], atol=2e-4, rtol=1e-3)


def test_nothing_is_replayed_beside_a_critic() -> None:
    with pytest.raises(ValueError, match="replay is for advantage='group'"):
        RlStage(advantage="gae", replay=ReplayConfig())


def test_the_limit_on_length_rises_to_its_end() -> None:
    limits = LengthCurriculum(start=16, end=64, steps=5)
    assert [limits.limit(step) for step in (1, 2, 3, 5, 9)] == [16, 28, 40, 64, 64]
    assert LengthCurriculum(start=8, end=8, steps=1).limit(1) == 8
    with pytest.raises(ValueError, match="falls from 9 to 8"):
        LengthCurriculum(start=9, end=8, steps=1)
