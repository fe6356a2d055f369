"""DPO and IPO beside TRL's trainer on the same pairs: the same loss and the same gradient.

Differences on purpose: TRL pads and computes a prompt once for each answer; here rows are packed and a prompt
is computed once for both. TRL cuts pairs that are too long; here a file with such a line is refused.
"""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from lehr.core.batch import Batch
from lehr.model.checkpoint import save_model
from lehr.model.tiny import random_decoder, tiny_config
from lehr.train.base import TrainConfig
from lehr.train.trainer import LocalTrainer

pytest.importorskip("trl", reason="pip install 'lehr[trl]'")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def pair_rows(samples):
    rows = []
    for chosen, rejected in zip(samples[::2], samples[1::2], strict=True):
        prompt = int(np.argmax(chosen.own))
        rows.append(
            {
                "prompt_ids": chosen.tokens[:prompt].tolist(),
                "chosen_ids": chosen.tokens[prompt:].tolist(),
                "rejected_ids": rejected.tokens[prompt:].tolist(),
            }
        )
    return rows


def theirs(tmp_path, rows, **settings):
    """TRL's loss on the policy and reference in ``tmp_path``, and its gradient by name."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl.trainer.dpo_config import DPOConfig
    from trl.trainer.dpo_trainer import DPOTrainer

    class Tokenised(DPOTrainer):
        def _prepare_dataset(self, dataset, *others, **named):
            return dataset

    words = {f"t{i}": i for i in range(264)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")), eos_token="t258", pad_token="t256"
    )
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        for name in ("policy", "reference")
    )
    args = DPOConfig(
        output_dir=str(tmp_path / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        max_length=None,
        per_device_train_batch_size=len(rows),
        **settings,
    )
    trainer = Tokenised(
        policy, reference, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )
    loss = trainer.compute_loss(policy, trainer.data_collator(rows))
    loss.backward()
    return loss.item(), {name: p.grad for name, p in policy.named_parameters()}


@pytest.mark.parametrize(
    ("ours", "settings"),
    [
        ({"preference_loss": "dpo", "beta": 0.3}, {"loss_type": ["sigmoid"], "beta": 0.3}),
        ({"preference_loss": "ipo", "beta": 0.2}, {"loss_type": ["ipo"], "beta": 0.2}),
    ],
)
def test_loss_and_gradient_are_those_of_trl(samples, tmp_path, ours, settings):
    save_model(random_decoder(tiny_config(num_layers=2), seed=1, std=0.1), tmp_path / "reference")
    save_model(random_decoder(tiny_config(num_layers=2), seed=2, std=0.1), tmp_path / "policy")
    pairs = []
    for number in range(5):
        group = samples.group(f"p{number}", 2)
        pairs += [replace(s, pair=f"p{number}", preferred=not i) for i, s in enumerate(group)]
    reference = LocalTrainer.open(tmp_path / "reference", TrainConfig(dtype="float32"))
    known = []
    for sample, said in zip(pairs, asyncio.run(reference.score(pairs)), strict=True):
        spread = np.zeros(len(sample.tokens), np.float32)
        spread[sample.own] = said
        known.append(replace(sample, reference=spread))
    config = TrainConfig(dtype="float32", tokens_per_microbatch=64, max_grad_norm=1e9, **ours)
    trainer = LocalTrainer.open(tmp_path / "policy", config)
    got = asyncio.run(trainer.step(Batch(0, "preference", tuple(known)))).metrics
    loss, grads = theirs(tmp_path, pair_rows(pairs), **settings)
    assert got["loss"] == pytest.approx(loss, rel=1e-5)
    norm = float(torch.nn.utils.get_total_norm(list(grads.values())))
    assert got["grad_norm"] == pytest.approx(norm, rel=1e-4)
    mine = trainer.optimizer.grads
    for ours_name, name in (
        ("embed.weight", "model.embed_tokens.weight"),
        ("norm.weight", "model.norm.weight"),
    ):
        torch.testing.assert_close(mine[ours_name] / norm, grads[name] / norm, atol=1e-5, rtol=0)
