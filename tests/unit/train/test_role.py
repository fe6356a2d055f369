"""The trainer in a process of its own."""

import asyncio

import numpy as np
import pytest
import torch

from lehr.cluster.base import Role
from lehr.cluster.local import LocalCluster
from lehr.core.batch import Batch
from lehr.core.errors import ConfigError, Diverged
from lehr.core.trace import Version
from lehr.model.checkpoint import load_decoder, load_tensors, read_tensors, save_model
from lehr.model.tiny import tiny_decoder
from lehr.model.tokenizer import ByteTokenizer
from lehr.train.base import TrainConfig
from lehr.train.remote import RemoteTrainer
from lehr.train.role import Share
from lehr.train.trainer import LocalTrainer


def test_a_remote_trainer_does_what_a_local_one_does(samples, tmp_path):
    save_model(tiny_decoder(seed=2), tmp_path / "start", ByteTokenizer())
    config = TrainConfig(learning_rate=1e-2, dtype="float32")
    batch = Batch(1, "policy_gradient", tuple(samples.group("g", 4)))
    bad = Batch(2, "sft", tuple(samples.group("h", 2)))
    torch.set_num_threads(1)

    async def work() -> None:
        cluster = LocalCluster(tmp_path)
        try:
            role = Role(
                "trainer",
                "lehr.train.role:build",
                {"model": str(tmp_path / "start"), "publish_to": str(tmp_path / "weights")},
            )
            handle = await cluster.start(role)
            remote = RemoteTrainer(handle)
            await remote.allot(Share(1))
            await remote.reset(config)
            result = await remote.step(batch)
            assert result.step == 1 and np.isfinite(result.metrics["loss"])
            manifest = await remote.publish(Version(3, 1))
            assert manifest.version == Version(3, 1)
            published = read_tensors(tmp_path / "weights" / manifest.path.rsplit("/", 1)[1])
            await remote.save(tmp_path / "saved")
            await remote.load(tmp_path / "saved")
            with pytest.raises(ConfigError, match=r"no config\.json"):
                await remote.load(tmp_path / "nowhere")
            await remote.reset(config.model_copy(update={"learning_rate": 1e30, "max_grad_norm": 1e30}))
            with pytest.raises(Diverged):
                for _ in range(5):
                    await remote.step(bad)
        finally:
            await cluster.close()
        local = LocalTrainer(load_decoder(tmp_path / "start"), config)
        await local.step(batch)
        mine = local.master.to_hf()
        saved = load_tensors(tmp_path / "saved")
        assert all(torch.equal(saved[name], tensor) for name, tensor in mine.items())
        assert all(
            torch.equal(published[name], tensor.to(published[name].dtype)) for name, tensor in mine.items()
        )

    asyncio.run(work())
    assert (tmp_path / "saved" / "optimizer.safetensors").exists()
    assert not list((tmp_path / "weights").glob("*.part"))
