"""Two ranks in two processes do what one does."""

import asyncio
import os
import signal

import numpy as np
import pytest
import torch

from lehr.core.batch import Batch
from lehr.core.errors import ConfigError, Diverged, RoleLost
from lehr.core.trace import Version
from lehr.model.checkpoint import read_tensors, save_model
from lehr.model.tiny import random_decoder, tiny_config
from lehr.model.tokenizer import ByteTokenizer
from lehr.train.base import LoraConfig, TrainConfig
from lehr.train.gang import GangTrainer
from lehr.train.shards import divide
from lehr.train.trainer import LocalTrainer

CONFIG = TrainConfig(learning_rate=1e-3, dtype="float32", tokens_per_microbatch=64, weight_decay=0.1)


def run(work):
    return asyncio.run(work)


def near(one, other, limit=1e-6):
    worst = max(float((one[name] - other[name]).abs().max()) for name in other)
    assert set(one) == set(other) and worst <= limit, worst


@pytest.fixture
def start(tmp_path):
    save_model(random_decoder(tiny_config(num_layers=2), seed=1, std=0.1), tmp_path / "start", ByteTokenizer())
    return tmp_path / "start"


def test_two_ranks_take_the_steps_of_one(samples, start, tmp_path):
    lonely = samples.one(samples.tokens(30), 20, advantage=0.7)  # the other rank has nothing, or more passes
    batches = [
        Batch(0, "policy_gradient", (*samples.group("a", 5), *samples.group("b", 3), lonely)),
        Batch(1, "sft", (lonely,)),
        Batch(2, "sft", tuple(samples.group("c", 7))),
        Batch(3, "policy_gradient", tuple(samples.group("d", 4))),
    ]
    one = LocalTrainer.open(start, CONFIG)
    two = GangTrainer(start, CONFIG, ranks=2, publish_to=tmp_path / "weights")
    try:
        for batch in batches[:2]:
            mine, theirs = run(one.step(batch)).metrics, run(two.step(batch)).metrics
            for name in set(mine) - {"seconds", "packed_tokens"}:
                assert theirs[name] == pytest.approx(mine[name], rel=1e-4, abs=1e-6), name
        run(two.save(tmp_path / "at2"))
        run(one.save(tmp_path / "one"))
        for name in ("model.safetensors", "optimizer.safetensors"):
            near(read_tensors(tmp_path / "at2" / name), read_tensors(tmp_path / "one" / name))
        for batch in batches[2:]:
            run(two.step(batch))
        write = two.snapshot(tmp_path / "whole")
        run(two.load(tmp_path / "at2"))
        write()
        for batch in batches[2:]:
            run(one.step(batch))
            run(two.step(batch))
        manifest = run(two.publish(Version(1, 1)))
        near(read_tensors(tmp_path / "weights" / manifest.path.rsplit("/", 1)[1]), one.master.to_hf())
        run(two.save(tmp_path / "again"))
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()

        bad = np.where(lonely.own, np.float32(np.nan), 0).astype(np.float32)
        spoilt = Batch(
            4,
            "policy_gradient",
            (*batches[0].samples, type(lonely)(lonely.tokens, lonely.own, lonely.logprobs, bad)),
        )
        with pytest.raises(Diverged):
            run(two.step(spoilt))
        with pytest.raises(ConfigError, match="one rank"):
            run(two.reset(CONFIG.model_copy(update={"lora": LoraConfig()})))
        run(two.reset(CONFIG.model_copy(update={"dtype": "bfloat16", "recompute_activations": True})))
        assert np.isfinite(run(two.step(batches[0])).metrics["loss"])
        os.kill(two._processes[0].pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(RoleLost, match="new gang"):
                run(two.step(batches[0]))
    finally:
        run(two.close())
    assert not torch.distributed.is_initialized()


def test_samples_are_divided_by_tokens_and_families_stay_together(samples):
    batch = [
        *samples.group("a", 4),
        *samples.group("b", 4),
        *(samples.one(samples.tokens(9), 3) for _ in range(5)),
    ]
    shares = divide(batch, 2)
    assert sorted(i for share in shares for i in share) == list(range(len(batch)))
    assert all(len({i in share for i in range(4)}) == 1 for share in shares)
    sizes = [sum(len(batch[i].tokens) for i in share) for share in shares]
    assert max(sizes) < 1.3 * min(sizes)
    one_family = divide(samples.group("a", 6), 2)
    assert [len(share) for share in one_family] == [3, 3]
