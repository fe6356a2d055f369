"""The same inputs through TRL's own trainers and through ours. Every difference that is meant has a test here
and a line in docs/training.md.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lehr.train.advantages import group_advantages, spread
from lehr.train.losses import PolicyObjective, PolicyTerms, PolicyTokens, cross_entropy, k3, policy_loss

pytest.importorskip("trl", reason="needs TRL: `pip install 'lehr[trl]'`")

LENGTHS = (3, 7, 5, 1, 6, 4)
EQUAL = {"atol": 1e-5, "rtol": 1e-5}


class Given:
    """Inputs of a batch of sequences padded on the right, float32 ``[B, T]``."""

    def __init__(self, seed: int = 0, drift: float = 0.4) -> None:
        source = torch.Generator().manual_seed(seed)
        shape = (len(LENGTHS), max(LENGTHS))
        self.mask = torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]
        self.old = -2 * torch.rand(shape, generator=source) - 0.05
        self.new = (self.old + drift * torch.randn(shape, generator=source)).clamp(max=-0.01).requires_grad_()
        self.reference = self.old + 0.2 * torch.randn(shape, generator=source)
        self.gains = torch.randn(shape[0], generator=source)

    def tokens(self) -> PolicyTokens:
        samples = torch.arange(len(LENGTHS))[:, None].expand(self.mask.shape)
        gains = self.gains[:, None].expand(self.mask.shape)
        return PolicyTokens(
            self.old[self.mask], gains[self.mask], samples[self.mask], self.reference[self.mask]
        )

    def ours(self, name: str, terms: PolicyTerms | None = None, mean_over: str = "token", **named: Any):
        objective = PolicyObjective(policy_loss(name), terms or PolicyTerms(dual_clip=None), **named)
        return self.summed(objective(self.new[self.mask], self.tokens()), mean_over)

    def summed(self, loss: torch.Tensor, mean_over: str = "token"):
        if mean_over == "sequence":
            lengths = torch.tensor(LENGTHS, dtype=torch.float32)
            weights = (1 / (len(LENGTHS) * lengths))[:, None].expand(self.mask.shape)[self.mask]
            total = (loss * weights).sum()
        else:
            total = loss.sum() / self.mask.sum()
        return total, torch.autograd.grad(total, self.new)[0]

    def theirs(self, **named: Any):
        """TRL's own ``_compute_loss``, on log-probabilities that are given instead of computed."""
        from trl import GRPOTrainer

        arguments = {
            "loss_type": "dapo",
            "importance_sampling_level": "token",
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.28,
            "delta": None,
            "off_policy_mask_threshold": None,
            "use_bias_correction_kl": False,
        } | named
        trainer = GRPOTrainer.__new__(GRPOTrainer)
        settings = SimpleNamespace(**arguments, steps_per_generation=1)
        values = {
            **arguments,
            "args": settings,
            "top_entropy_quantile": 1.0,
            "aux_loss_enabled": False,
            "use_vllm": False,
            "_entropy_bonus_enabled": False,
            "current_gradient_accumulation_steps": 1,
            "max_completion_length": 9,
            "model": SimpleNamespace(training=True),
            "_metrics": {"train": _Lists()},
            "accelerator": _OneProcess(),
        }
        trainer.__dict__.update(values)
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
            self.new,
            torch.zeros_like(self.new),
            None,
        )
        ids = torch.zeros_like(self.mask, dtype=torch.int64)
        loss = trainer._compute_loss(
            None,
            {
                "prompt_ids": ids,
                "prompt_mask": ids + 1,
                "completion_ids": ids,
                "completion_mask": self.mask.long(),
                "advantages": self.gains,
                "old_per_token_logps": self.old,
                "ref_per_token_logps": self.reference,
                "num_items_in_batch": self.mask.sum(),
            },
        )
        return loss, torch.autograd.grad(loss, self.new)[0]


class _Lists(dict[str, list[float]]):
    def __missing__(self, key: str) -> list[float]:
        return self.setdefault(key, [])


class _OneProcess:
    """What ``_compute_loss`` asks of an accelerator, for a world of one process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, value: torch.Tensor) -> torch.Tensor:
        return value

    gather_for_metrics = gather

    def reduce(self, value: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return value


def assert_equal(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours[0], theirs[0], **EQUAL)
    torch.testing.assert_close(ours[1], theirs[1], **EQUAL)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("mean_over", "loss_type"), [("token", "dapo"), ("token", "bnpo"), ("sequence", "grpo")]
)
def test_ppo_clip_is_grpo(seed: int, mean_over: str, loss_type: str):
    given = Given(seed)
    assert_equal(given.ours("ppo_clip", mean_over=mean_over), given.theirs(loss_type=loss_type))


@pytest.mark.parametrize("seed", range(3))
def test_gspo_is_grpo_at_the_level_of_sequences(seed: int):
    given = Given(seed, drift=0.1)
    terms = PolicyTerms(gspo_low=0.02, gspo_high=0.03)
    for mean_over, loss_type in (("token", "dapo"), ("sequence", "grpo")):
        theirs = given.theirs(
            loss_type=loss_type, importance_sampling_level="sequence", epsilon_low=0.02, epsilon_high=0.03
        )
        assert_equal(given.ours("gspo", terms, mean_over), theirs)


@pytest.mark.parametrize("seed", range(3))
def test_cispo_is_cispo(seed: int):
    given = Given(seed)
    theirs = given.theirs(loss_type="cispo", epsilon_high=1.5)
    assert_equal(given.ours("cispo", PolicyTerms(cispo_cap=1.5)), theirs)


def test_the_off_policy_mask_is_that_of_deepseek():
    for seed in range(6):
        given = Given(seed)
        theirs = given.theirs(off_policy_mask_threshold=0.1)
        assert_equal(given.ours("ppo_clip", off_policy_delta=0.1), theirs)


def test_the_first_step_has_the_same_gradient_under_every_loss():
    given = Given(drift=0.0)
    theirs = given.theirs()
    for name in ("ppo_clip", "decoupled_ppo", "cispo", "tis", "none", "dppo_tv"):
        torch.testing.assert_close(given.ours(name)[1], theirs[1], **EQUAL)


def test_difference_the_penalty_is_k2_and_theirs_is_k3():
    given = Given()
    beta = 0.3
    theirs = given.theirs(beta=beta)
    plain = given.theirs()
    new, reference = given.new[given.mask], given.reference[given.mask]
    of_k3 = given.summed(beta * k3(new, reference))
    assert_equal((plain[0] + of_k3[0], plain[1] + of_k3[1]), theirs)
    ours = given.ours("ppo_clip", loss_kl=beta)
    of_k2 = given.summed(beta * 0.5 * (given.new[given.mask] - reference).square())
    assert_equal(ours, (plain[0] + of_k2[0], plain[1] + of_k2[1]))


def test_difference_dual_clip_is_on_and_theirs_has_delta_for_it():
    given = Given(1, drift=3.0)
    given.gains = -given.gains.abs()
    theirs, plain = given.theirs(delta=3.0), given.theirs()
    assert not torch.allclose(theirs[0], plain[0])
    ours = given.ours("ppo_clip", PolicyTerms(dual_clip=3.0))
    assert_equal(
        ours, theirs
    )  # a cap of the ratio on either sign: above 1.28 positive advantages are clipped already


def test_difference_nothing_is_added_to_the_spread_of_a_group():
    rewards = [0.0, 1.0, 1.0, 0.25]
    values = torch.tensor(rewards)
    theirs = (values - values.mean()) / (values.std() + 1e-4)  # scale_rewards="group"
    centred = group_advantages(rewards)
    ours = centred / spread(centred.tolist(), ddof=1)
    np.testing.assert_allclose(
        ours * float(values.std()) / (float(values.std()) + 1e-4), theirs.numpy(), atol=1e-5
    )
    assert np.abs(ours - theirs.numpy()).max() < 1e-3


def test_sft_is_the_loss_of_trl():
    from transformers.loss.loss_utils import ForCausalLMLoss

    source = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 9, 17, generator=source, requires_grad=True)
    labels = torch.randint(0, 17, (2, 9), generator=source)
    labels[0, :4], labels[1, :6] = -100, -100
    count = int((labels[:, 1:] != -100).sum())
    theirs = ForCausalLMLoss(logits, labels, 17, num_items_in_batch=torch.tensor(count))
    own = labels[:, 1:] != -100
    logprobs = torch.log_softmax(logits[:, :-1], -1)[own].gather(1, labels[:, 1:][own][:, None])[:, 0]
    ours = (cross_entropy(logprobs) / count).sum()
    torch.testing.assert_close(ours, theirs, **EQUAL)
    slopes = [torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*slopes, **EQUAL)
