"""Adapters of low rank: gradients, checkpoints, and what engines and other readers get."""

import asyncio

import pytest
import torch
from pydantic import ValidationError

from lehr.core.batch import Batch
from lehr.core.errors import ConfigError
from lehr.core.trace import Sampling, Version
from lehr.engine.local import open_engine
from lehr.engine.native.settings import NativeConfig
from lehr.model.checkpoint import load_decoder, save_model
from lehr.model.lora import read_adapter
from lehr.model.tiny import random_decoder, tiny_config
from lehr.model.tokenizer import ByteTokenizer
from lehr.train.base import LoraConfig, TrainConfig
from lehr.train.trainer import LocalTrainer

LORA = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "v_proj", "down_proj", "up_proj"))
CONFIG = TrainConfig(learning_rate=2e-2, dtype="float32", lora=LORA)


def fresh(config=CONFIG):
    decoder = random_decoder(tiny_config(num_layers=2), seed=1, std=0.1)
    return LocalTrainer(decoder, config, tokenizer=ByteTokenizer())


def step(trainer, samples, loss="policy_gradient"):
    return asyncio.run(trainer.step(Batch(0, loss, tuple(samples)))).metrics


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.master.to_hf().items()}


def test_only_targets_move_and_the_loss_falls(samples):
    trainer, batch = fresh(), samples.group("g", 6)
    before = weights(trainer)
    losses = [step(trainer, batch, "sft")["loss"] for _ in range(10)]
    assert losses[-1] < losses[0] - 0.3
    moved = {name.split(".")[-2] for name, t in weights(trainer).items() if not torch.equal(t, before[name])}
    assert moved == set(LORA.targets)


def test_gradients_are_those_of_the_merged_weights(samples):
    trainer, batch = fresh(), samples.group("g", 5)
    step(trainer, batch)  # from B = 0 the gradient of A would be 0
    grads = {name: grad.clone() for name, grad in trainer.optimizer.grads.items()}
    assert all(not grad.any() for name, grad in grads.items() if name.endswith(".A"))
    plain = LocalTrainer(trainer.master, CONFIG.model_copy(update={"lora": None, "max_grad_norm": 1e9}))
    held = {name: p.detach().clone() for name, p in trainer.adapters.weights.items()}
    masters = {name: p.detach().clone() for name, p in trainer.master.named_parameters()}
    step(plain, batch)
    full = {name: grad.clone() for name, grad in plain.optimizer.grads.items()}
    for name, parameter in trainer.master.named_parameters():
        parameter.data.copy_(masters[name])
    trainer = fresh(CONFIG.model_copy(update={"learning_rate": 1e-9}))
    for name, parameter in trainer.adapters.weights.items():
        parameter.data.copy_(held[name])
    trainer.adapters.merge()
    step(trainer, batch)
    for layer in range(2):
        grad, name = full[f"layers.{layer}.down.weight"], f"{layer}.down_proj"
        up, down = held[f"{name}.B"], held[f"{name}.A"]
        torch.testing.assert_close(
            trainer.optimizer.grads[f"{name}.A"], 2 * up.t() @ grad, rtol=1e-3, atol=1e-6
        )
        torch.testing.assert_close(
            trainer.optimizer.grads[f"{name}.B"], 2 * grad @ down.t(), rtol=1e-3, atol=1e-6
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_ends_with_the_same_bits(samples, tmp_path, dtype):
    config = CONFIG.model_copy(update={"dtype": dtype})
    batches = [samples.group(str(n), 4) for n in range(4)]
    whole, killed = fresh(config), fresh(config)
    for batch in batches:
        step(whole, batch)
    for batch in batches[:2]:
        step(killed, batch)
    asyncio.run(killed.save(tmp_path / "at2"))
    resumed = LocalTrainer.open(tmp_path / "at2", config)
    asyncio.run(resumed.load(tmp_path / "at2"))
    for batch in batches[2:]:
        step(resumed, batch)
    one, other = weights(whole), weights(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_state_of_another_rank_is_refused(samples, tmp_path):
    trainer = fresh()
    step(trainer, samples.group("g", 4))
    asyncio.run(trainer.save(tmp_path / "a"))
    other = fresh(CONFIG.model_copy(update={"lora": LORA.model_copy(update={"rank": 2})}))
    with pytest.raises(ConfigError):
        asyncio.run(other.load(tmp_path / "a"))


def test_a_stage_after_it_trains_all_merged_weights(samples):
    trainer = fresh()
    step(trainer, samples.group("g", 4))
    merged = weights(trainer)
    asyncio.run(trainer.reset(TrainConfig(learning_rate=1e-3, dtype="float32")))
    assert all(torch.equal(t, merged[name]) for name, t in weights(trainer).items())
    step(trainer, samples.group("h", 4))
    assert all(not torch.equal(t, merged[name]) for name, t in weights(trainer).items())


def test_an_engine_answers_alike_with_merged_weights_and_with_the_adapter(samples, tmp_path):
    trainer = fresh()
    save_model(trainer.master, tmp_path / "base", ByteTokenizer())
    for number in range(4):
        step(trainer, samples.group(str(number), 4))
    asyncio.run(trainer.save(tmp_path / "trained"))
    parts = read_adapter(tmp_path / "trained" / "adapter", trainer.master.config, torch.float32)
    base, merged = (dict(load_decoder(tmp_path / name).named_parameters()) for name in ("base", "trained"))
    for (layer, fused), part in parts.items():
        name = f"layers.{layer}.{fused}.weight"
        torch.testing.assert_close(base[name] + part.up_OR @ part.down_RI, merged[name], atol=1e-6, rtol=1e-5)

    async def answer(folder, adapter):
        engine = open_engine(folder, NativeConfig(dtype="float32"), Version(1, 0))
        try:
            if adapter:
                await engine.load_adapter("mine", tmp_path / "trained" / "adapter")
            sampling = Sampling(temperature=0.0, max_tokens=20, adapter="mine" if adapter else "")
            return (await engine.generate([*b"hello"], sampling)).tokens.tolist()
        finally:
            await engine.close()

    with_adapter = asyncio.run(answer(tmp_path / "base", True))
    assert with_adapter == asyncio.run(answer(tmp_path / "trained", False))
    assert with_adapter != asyncio.run(answer(tmp_path / "base", False))


def test_a_target_named_twice_is_refused():
    with pytest.raises(ValidationError, match="twice"):
        LoraConfig(targets=("q_proj", "q_proj"))
