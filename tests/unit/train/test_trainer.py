"""Steps, checkpoints and published weights of the trainer."""

import asyncio
import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lehr.core.batch import Batch
from lehr.core.errors import ConfigError, Diverged
from lehr.core.protocols import ListRecorder
from lehr.core.trace import Sampling, Version
from lehr.engine.local import open_engine
from lehr.engine.native.settings import NativeConfig
from lehr.model.tiny import random_decoder, tiny_config
from lehr.model.tokenizer import ByteTokenizer
from lehr.train.base import TrainConfig
from lehr.train.trainer import LocalTrainer

CONFIG = TrainConfig(learning_rate=1e-2, dtype="float32")


def fresh(config=CONFIG, **named):
    return LocalTrainer(random_decoder(tiny_config(num_layers=2), seed=1, std=0.1), config, **named)


def run(work):
    return asyncio.run(work)


def step(trainer, samples, loss="policy_gradient", number=0):
    return run(trainer.step(Batch(number, loss, tuple(samples)))).metrics


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.master.to_hf().items()}


def equal(one, other):
    return all(torch.equal(one[name], other[name]) for name in other)


def test_sft_lowers_the_loss(samples):
    trainer = fresh()
    batch = samples.group("g", 6)
    losses = [step(trainer, batch, "sft")["loss"] for _ in range(8)]
    assert losses[-1] < losses[0] - 1.0


def test_policy_gradient_moves_towards_advantages(samples):
    trainer = fresh()
    batch = samples.group("g", 8)
    before = run(trainer.score(batch))
    for sample, values in zip(batch, before, strict=True):
        sample.logprobs[sample.own] = values
    metrics = step(trainer, batch)
    assert metrics["ratio"] == pytest.approx(1, abs=1e-4)
    assert metrics["mismatch_kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["ess"] == pytest.approx(1, abs=1e-4)
    after = run(trainer.score(batch))
    gained = [float((a - b).mean()) for a, b in zip(after, before, strict=True)]
    assert np.mean(gained[1::2]) > 0 > np.mean(gained[::2])


def test_r12_a_group_without_variance_gives_no_gradient_at_all(samples):
    trainer = fresh()
    before = weights(trainer)
    flat = [replace(s, advantages=np.zeros_like(s.advantages)) for s in samples.group("flat", 4)]
    metrics = step(trainer, flat)
    assert metrics["loss"] == 0.0 and metrics["grad_norm"] == 0.0 and metrics["samples_without_signal"] == 4
    assert equal(before, weights(trainer))
    live = samples.group("live", 4)
    alone, beside = fresh(), fresh()
    step(alone, live)
    step(beside, [*flat, *live])
    assert equal(weights(alone), weights(beside))


def test_r12_a_switch_says_otherwise(samples):
    trainer = fresh(CONFIG.model_copy(update={"train_without_variance": True}))
    flat = [replace(s, advantages=np.zeros_like(s.advantages)) for s in samples.group("flat", 4)]
    assert step(trainer, flat)["grad_norm"] > 0


def test_a_member_at_the_mean_counts_in_the_denominator(samples):
    group = samples.group("g", 3)
    middle = replace(group[2], advantages=np.zeros_like(group[2].advantages))
    metrics = step(fresh(), [*group[:2], middle])
    assert metrics["loss_tokens"] == sum(int(s.own.sum()) for s in group)


def test_r13_denominators_count_loss_tokens_only(samples):
    prompt = samples.tokens(10)
    valid = samples.one(prompt, 4, advantage=1.0)
    masked = replace(samples.one(prompt, 9), own=np.zeros(19, bool))
    metrics = step(fresh(), [valid, masked])
    assert metrics["loss_tokens"] == 4
    trainer = fresh(CONFIG.model_copy(update={"policy_loss": "none"}))
    (logprobs,) = run(trainer.score([valid]))
    loss = step(trainer, [valid, masked])["loss"]
    assert loss == pytest.approx(-float(logprobs.sum()) / 4, rel=1e-5)


def test_r13_a_batch_with_nothing_valid_gives_loss_zero(samples):
    trainer = fresh()
    before = weights(trainer)
    masked = replace(samples.one(samples.tokens(10), 9), own=np.zeros(19, bool))
    for batch in ([masked], []):
        for loss in ("sft", "policy_gradient"):
            assert step(trainer, batch, loss)["loss"] == 0.0
    assert trainer.optimizer.steps == 0
    assert equal(before, weights(trainer))


def test_r22_one_optimiser_step_per_batch(samples):
    trainer = fresh(CONFIG.model_copy(update={"tokens_per_microbatch": 64}))
    turns = [samples.one(samples.tokens(20), 4, 5, 6, advantage=1.0) for _ in range(6)]
    step(trainer, turns)
    assert trainer.optimizer.steps == 1


def test_a_value_that_is_not_finite_changes_nothing(samples):
    trainer = fresh()
    good = samples.group("g", 4)
    step(trainer, good)
    before, state = weights(trainer), {k: v.clone() for k, v in trainer.optimizer.state().items()}
    bad = replace(good[0], advantages=np.where(good[0].own, np.float32(np.nan), 0).astype(np.float32))
    with pytest.raises(Diverged, match="learning_rate"):
        step(trainer, [bad, *good[1:]])
    assert equal(before, weights(trainer))
    assert equal(state, trainer.optimizer.state())
    assert np.isfinite(step(trainer, good)["loss"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_ends_with_the_same_bits(samples, tmp_path, dtype):
    config = CONFIG.model_copy(update={"warmup_steps": 4, "dtype": dtype})
    batches = [samples.group(str(n), 4) for n in range(4)]
    whole, killed = fresh(config), fresh(config)
    for number, batch in enumerate(batches):
        step(whole, batch, number=number)
    for batch in batches[:2]:
        step(killed, batch)
    run(killed.save(tmp_path / "at2"))
    resumed = LocalTrainer.open(tmp_path / "at2", config)
    run(resumed.load(tmp_path / "at2"))
    for batch in batches[2:]:
        step(resumed, batch)
    assert equal(weights(whole), weights(resumed))
    assert equal(whole.optimizer.state(), resumed.optimizer.state())


def test_a_load_without_the_optimiser_starts_it_fresh(samples, tmp_path):
    trainer = fresh()
    step(trainer, samples.group("g", 4))
    run(trainer.save(tmp_path / "a", resumable=False))
    saved = weights(trainer)
    step(trainer, samples.group("h", 4))
    with pytest.raises(ConfigError, match="optimizer"):
        run(trainer.load(tmp_path / "a"))
    run(trainer.load(tmp_path / "a", optimizer=False))
    assert equal(saved, weights(trainer))
    assert trainer.optimizer.steps == 0


def test_a_model_of_another_shape_is_refused(samples, tmp_path):
    run(LocalTrainer(random_decoder(tiny_config(num_layers=1))).save(tmp_path / "other"))
    with pytest.raises(ConfigError, match="shape"):
        run(fresh().load(tmp_path / "other"))


def test_a_saved_folder_opens_with_transformers(samples, tmp_path):
    trainer = fresh()
    step(trainer, samples.group("g", 4))
    run(trainer.save(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    (sample,) = samples.group("h", 1)
    (ours,) = run(trainer.score([sample]))
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))
    with torch.no_grad():
        logits = model(tokens[None, :-1]).logits[0]
    theirs = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
    assert ours == pytest.approx(theirs[torch.from_numpy(sample.own[1:].copy())].numpy(), abs=1e-4)


def test_a_trained_folder_answers_in_transformers_as_in_the_engine(samples, tmp_path):
    trainer = fresh(tokenizer=ByteTokenizer())
    for number in range(3):
        step(trainer, samples.group("g", 4), number=number)
    run(trainer.save(tmp_path / "model"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    greedy = Sampling(temperature=0.0, max_tokens=24)
    prompts = [[*text.encode()] for text in ("sort a.txt", "the largest of xs", "Total: 12.50 EUR")]

    async def ours():
        engine = open_engine(tmp_path / "model", NativeConfig(dtype="float32"), Version(1, 0))
        try:
            return await asyncio.gather(*(engine.generate(prompt, greedy) for prompt in prompts))
        finally:
            await engine.close()

    for prompt, completion in zip(prompts, run(ours()), strict=True):
        tokens = completion.tokens.tolist()
        ids = torch.tensor([prompt])
        theirs = model.generate(
            ids, do_sample=False, max_new_tokens=len(tokens), eos_token_id=None, pad_token_id=0
        )
        assert tokens == theirs[0, len(prompt) :].tolist()


def test_published_weights_are_complete_digested_and_few(tmp_path):
    trainer = fresh(publish_to=tmp_path)
    manifests = [run(trainer.publish(Version(1, n))) for n in range(4)]
    assert sorted(p.name for p in tmp_path.iterdir()) == [m.path.rsplit("/", 1)[1] for m in manifests[-2:]]
    data = (tmp_path / manifests[-1].path).read_bytes()
    assert manifests[-1].digest == hashlib.blake2b(data, digest_size=16).hexdigest()
    assert manifests[-1].nbytes == len(data)
    assert equal(load_file(manifests[-1].path), trainer.master.to_hf())
    run(trainer.close())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", [torch.nan, 1e25])
def test_weights_that_nothing_can_be_sampled_from_are_not_published(tmp_path, broken):
    trainer = fresh(publish_to=tmp_path)
    with torch.no_grad():
        next(trainer.master.blocks()).down.weight[0, 0] = broken
    with pytest.raises(Diverged, match="give values that are not finite"):
        run(trainer.publish(Version(1, 1)))
    assert not list(tmp_path.iterdir())


def test_without_a_folder_nothing_is_published():
    with pytest.raises(ConfigError, match="publish_to"):
        run(fresh().publish(Version(1, 1)))


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_masters(samples, tmp_path):
    trainer = fresh(CONFIG.model_copy(update={"dtype": "bfloat16", "learning_rate": 1e-6}), publish_to=tmp_path)
    before = weights(trainer)
    metrics = step(trainer, samples.group("g", 4))
    changed = [name for name, tensor in weights(trainer).items() if not torch.equal(tensor, before[name])]
    assert len(changed) == len(before)
    assert np.isfinite(metrics["loss"])
    published = load_file(run(trainer.publish(Version(1, 1))).path)
    assert all(tensor.dtype == torch.bfloat16 for tensor in published.values())


def test_a_new_stage_starts_with_a_fresh_optimiser(samples):
    trainer = fresh()
    step(trainer, samples.group("g", 4))
    kept = weights(trainer)
    run(trainer.reset(TrainConfig(learning_rate=5e-3, warmup_steps=10)))
    assert trainer.optimizer.steps == 0 and equal(kept, weights(trainer))
    assert step(trainer, samples.group("h", 4))["learning_rate"] == pytest.approx(5e-4)


def test_steps_are_reported(samples):
    recorder = ListRecorder()
    trainer = fresh(recorder=recorder)
    metrics = step(trainer, samples.group("g", 4), number=7)
    ((kind, fields),) = recorder.events
    assert kind == "train.step" and fields["step"] == 7 and fields["loss"] == metrics["loss"]
