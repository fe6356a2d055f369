"""Steps on pairs: reward models and preference losses, and what a checkpoint of a scalar head is."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from lehr.core.batch import Batch
from lehr.core.errors import ConfigError
from lehr.model.checkpoint import load_config, load_decoder, load_scalar, save_model
from lehr.model.tiny import random_decoder, tiny_config
from lehr.train.base import TrainConfig
from lehr.train.trainer import LocalTrainer

CONFIG = TrainConfig(learning_rate=1e-2, dtype="float32")


@pytest.fixture
def folder(tmp_path):
    save_model(random_decoder(tiny_config(num_layers=2), seed=1, std=0.1), tmp_path / "model")
    return tmp_path / "model"


def run(work):
    return asyncio.run(work)


def step(trainer, samples, loss, number=0):
    return run(trainer.step(Batch(number, loss, tuple(samples)))).metrics


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.master.to_hf().items()}


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in other)


def scored(samples, count, first=10, ahead=0.0):
    """Pairs of which the preferred one ends in a letter and the other in a digit; one number at the end."""
    found = []
    for number in range(first, first + count):
        prompt = samples.tokens(12)
        for preferred in (True, False):
            last = int(samples.random.integers(97, 123) if preferred else samples.random.integers(48, 58))
            made = samples.one([*prompt, *samples.tokens(4), last], 1)
            target = np.where(made.own & preferred, np.float32(ahead), np.float32(0))
            found.append(
                replace(made, pair=f"p{number}", prefix=f"p{number}", preferred=preferred, returns=target)
            )
    return found


def answered(samples, count):
    """Pairs of answers of one prompt, of different lengths."""
    found = []
    for number in range(count):
        group = samples.group(f"p{number}", 2)
        found += [
            replace(s, pair=f"p{number}", preferred=bool(i), logprobs=s.logprobs * 0)
            for i, s in enumerate(group)
        ]
    return found


def valued(sample):
    """A sample whose critic is to learn what the token before was."""
    returns = np.where(sample.own, 0.5 + np.roll(sample.tokens, 1) / 256, 0).astype(np.float32)
    return replace(sample, values=np.zeros_like(returns), returns=returns)


def with_reference(trainer, samples):
    found = []
    for sample, said in zip(samples, run(trainer.score(samples)), strict=True):
        reference = np.zeros(len(sample.tokens), np.float32)
        reference[sample.own] = said
        found.append(replace(sample, reference=reference))
    return found


def test_a_reward_model_learns_to_tell_the_better_one(samples, folder):
    trainer = LocalTrainer.open(folder, CONFIG, scalar=True)
    first = step(trainer, scored(samples, 16), "reward")
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6) and first["accuracy"] == 0.5
    for number in range(12):
        step(trainer, scored(samples, 16), "reward", number)
    held_out = step(trainer, scored(samples, 64), "reward")
    assert held_out["accuracy"] > 0.95 and held_out["margin"] > 1


def test_a_margin_asks_for_more(samples, folder):
    trainer = LocalTrainer.open(folder, CONFIG, scalar=True)
    assert step(trainer, scored(samples, 8, ahead=2.0), "reward")["loss"] == pytest.approx(
        np.log(1 + np.exp(2))
    )


def test_a_reward_model_opens_in_transformers_and_says_the_same(samples, folder, tmp_path):
    trainer = LocalTrainer.open(folder, CONFIG, scalar=True)
    for number in range(3):
        step(trainer, scored(samples, 8), "reward", number)
    run(trainer.save(tmp_path / "reward", resumable=False))
    config = load_config(tmp_path / "reward")
    assert config.scalar and config == trainer.master.config
    assert same(weights(trainer), load_decoder(tmp_path / "reward").to_hf())
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward", dtype=torch.float32)
    assert model.config.num_labels == 1
    batch = scored(samples, 3)
    ours = [float(said[0]) for said in run(trainer.score(batch))]
    texts = [torch.from_numpy(s.tokens[:-1].astype(np.int64)) for s in batch]  # the last one carries the score
    pad = model.config.pad_token_id
    ids = torch.full((len(texts), 3 + max(map(len, texts))), pad)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    with torch.no_grad():
        theirs = model(ids, attention_mask=(torch.arange(ids.shape[1]) < 17).expand_as(ids).long()).logits[:, 0]
    assert np.ptp(ours) > 0.1
    assert ours == pytest.approx(theirs.tolist(), abs=1e-4)


def test_the_padding_of_a_reward_model_ends_no_answer():
    config = tiny_config().model_copy(update={"pad_id": 2, "bos_ids": (1,), "eos_ids": (2,)})
    assert config.with_scalar_head().pad_id == 1
    assert config.model_copy(update={"bos_ids": (2,)}).with_scalar_head().pad_id == 0
    assert tiny_config().with_scalar_head().with_scalar_head() == tiny_config().with_scalar_head()


@pytest.mark.parametrize("loss", ["reward", "value", "dpo", "ipo"])
def test_r14_the_gradient_depends_on_neither_order_nor_split(samples, folder, loss):
    scalar = loss in ("reward", "value")
    if loss == "value":
        batch = [valued(s) for s in samples.group("g", 9)]
    else:
        batch = scored(samples, 6, ahead=0.5) if scalar else answered(samples, 6)
    config = CONFIG.model_copy(update={"value_clip": 0.1} if scalar else {"preference_loss": loss})
    name = loss if scalar else "preference"
    found = []
    for budget, order in ((1 << 20, 1), (64, -1), (100, 1)):
        trainer = LocalTrainer.open(
            folder, config.model_copy(update={"tokens_per_microbatch": budget}), scalar=scalar
        )
        if scalar:
            torch.manual_seed(0)
            trainer.master.head.weight.data.normal_()
        else:
            batch = with_reference(trainer, batch)
            trainer.master.layers[0].down.weight.data.mul_(1.1)  # pyright: ignore
        metrics = step(trainer, batch[::order], name)
        grads = {name: g.clone() for name, g in trainer.optimizer.grads.items()}
        found.append((metrics, grads))
    (first, grads), *others = found
    size = max(float(g.abs().max()) for g in grads.values())
    assert size > 1e-4
    for metrics, found_grads in others:
        assert metrics["loss"] == pytest.approx(first["loss"], rel=1e-5)
        assert metrics.get("accuracy") == first.get("accuracy")
        for name, grad in grads.items():
            torch.testing.assert_close(found_grads[name] / size, grad / size, atol=1e-5, rtol=0, msg=name)


def test_dpo_moves_towards_the_preferred_answers(samples, folder):
    trainer = LocalTrainer.open(folder, CONFIG)
    batch = with_reference(trainer, answered(samples, 6))
    metrics = [step(trainer, batch, "preference", n) for n in range(8)]
    assert metrics[0]["loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert metrics[-1]["accuracy"] == 1 and metrics[-1]["loss"] < 0.4


def test_ipo_stops_at_its_margin(samples, folder):
    config = CONFIG.model_copy(update={"preference_loss": "ipo", "beta": 0.5, "learning_rate": 3e-3})
    trainer = LocalTrainer.open(folder, config)
    batch = with_reference(trainer, answered(samples, 3))
    for number in range(60):
        metrics = step(trainer, batch, "preference", number)
    assert metrics["margin"] == pytest.approx(1.0, abs=0.15)


def test_pairs_that_are_not_whole_are_refused(samples, folder):
    trainer = LocalTrainer.open(folder, CONFIG)
    batch = with_reference(trainer, answered(samples, 3))
    with pytest.raises(ConfigError, match=r"'p1'.*1 preferred and 0 other"):
        step(trainer, [s for s in batch if s.pair != "p1" or s.preferred], "preference")
    with pytest.raises(ConfigError, match="reference"):
        step(trainer, answered(samples, 1), "preference")
    with pytest.raises(ConfigError, match="head"):
        step(trainer, batch, "reward")
    with pytest.raises(ConfigError, match="head"):
        step(LocalTrainer.open(folder, CONFIG, scalar=True), batch, "preference")


def test_a_critic_fits_its_returns_and_resumes_with_the_same_bits(samples, folder, tmp_path):
    batches = [[valued(s) for s in samples.group("g", 4)] for _ in range(6)]
    whole = LocalTrainer.open(folder, CONFIG, scalar=True)
    losses = [step(whole, b, "value", n)["loss"] for n, b in enumerate(batches)]
    assert losses[-1] < losses[0]
    killed = LocalTrainer.open(folder, CONFIG, scalar=True)
    for b in batches[:3]:
        step(killed, b, "value")
    run(killed.save(tmp_path / "critic"))
    resumed = LocalTrainer.open(folder, CONFIG, scalar=True)
    run(resumed.load(tmp_path / "critic"))
    for b in batches[3:]:
        step(resumed, b, "value")
    assert same(weights(whole), weights(resumed))
    assert same(whole.optimizer.state(), resumed.optimizer.state())


def test_a_critic_starts_again_from_a_language_model(samples, folder):
    trainer = LocalTrainer.open(folder, CONFIG, scalar=True)
    fresh = weights(trainer)
    step(trainer, scored(samples, 4), "reward")
    run(trainer.load(folder, optimizer=False))
    assert same(fresh, weights(trainer))
    assert same(fresh, load_scalar(folder).to_hf())
