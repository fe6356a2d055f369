"""The trainer in a process of its own."""

import asyncio
import threading

import numpy as np
import pytest
import torch

import lehr.train.trainer as trainer_module
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
from lehr.train.role import Location, Share, build
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


def test_steps_go_on_while_a_checkpoint_is_written(samples, tmp_path, monkeypatch):
    save_model(tiny_decoder(seed=2), tmp_path / "start", ByteTokenizer())
    config = TrainConfig(learning_rate=1e-2, dtype="float32")
    batches = [Batch(n, "sft", tuple(samples.group(str(n), 3))) for n in range(3)]
    gate = threading.Event()
    really = trainer_module.save_model

    def slowly(*arguments) -> None:
        assert gate.wait(20)
        really(*arguments)

    async def work() -> None:
        service = await build(
            {"model": str(tmp_path / "start"), "publish_to": str(tmp_path / "w"), "train": config.model_dump()}
        )
        await service.step(batches[0])
        monkeypatch.setattr(trainer_module, "save_model", slowly)
        await service.save(Location(str(tmp_path / "at1"), background=True))
        await service.step(batches[1])
        assert not (tmp_path / "at1").exists()
        gate.set()
        await service.settle()
        await service.step(batches[2])
        monkeypatch.setattr(trainer_module, "save_model", really)
        await service.save(Location(str(tmp_path / "whole")))
        await service.load(Location(str(tmp_path / "at1")))
        for batch in batches[1:]:
            await service.step(batch)
        await service.save(Location(str(tmp_path / "again")))
        (tmp_path / "file").write_text("")
        await service.save(Location(str(tmp_path / "file" / "below"), background=True))
        with pytest.raises(ConfigError, match="cannot write"):
            await service.settle()
        await service.save(Location(str(tmp_path / "file" / "below"), background=True))
        await asyncio.wait([service._writing])
        with pytest.raises(ConfigError, match="cannot write"):
            await service.step(batches[0])
        await service.step(batches[0])
        await service.close()

    asyncio.run(work())
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
