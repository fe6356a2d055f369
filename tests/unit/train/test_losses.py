"""Formulas of the losses, with the numbers of the cases."""

import numpy as np
import pytest
import torch

from lehr.core.errors import UnknownName
from lehr.train.losses import (
    PolicyTerms,
    PolicyTokens,
    dppo_keep,
    dppo_tv,
    policy_loss,
    sequence_ratios,
    tis,
    uncorrected,
)

TERMS = PolicyTerms()


def log(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64).log()


def seen(sampled: torch.Tensor, advantages: torch.Tensor) -> PolicyTokens:
    return PolicyTokens(sampled, advantages, torch.zeros(len(sampled), dtype=torch.int64))


def test_r2_a_sequence_weight_does_not_depend_on_length():
    lengths = (1, 4, 400, 4000)
    change = torch.full((sum(lengths),), 0.01, dtype=torch.float64)
    numbers = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    assert sequence_ratios(change, numbers).tolist() == pytest.approx([np.exp(0.01)] * 4)
    noise = torch.randn(20000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.05
    short = sequence_ratios(noise[:, 0], torch.arange(20000) // 4).mean()
    long = sequence_ratios(noise[:, 0], torch.arange(20000) // 400).mean()
    assert float(short) == pytest.approx(float(long), abs=2e-3)


def test_dppo_drops_only_what_moves_further_the_way_it_is_pushed():
    new, old = log(0.8, 0.8, 0.1, 0.1, 0.5), log(0.5, 0.5, 0.5, 0.5, 0.4)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0], dtype=torch.float64)
    assert dppo_keep(new, old, advantages, 0.2).tolist() == [False, True, False, True, True]


def test_dppo_at_ratio_one_is_minus_the_advantage_with_the_policy_gradient():
    new = log(0.3, 0.6).requires_grad_()
    advantages = torch.tensor([2.0, -1.0], dtype=torch.float64)
    loss = dppo_tv(new, seen(new.detach(), advantages), TERMS)
    assert loss.tolist() == pytest.approx([-2.0, 1.0])
    (grad,) = torch.autograd.grad(loss.sum(), new)
    assert grad.tolist() == pytest.approx([-2.0, 1.0])


def test_a_dropped_token_still_feels_the_penalty():
    new = log(0.9).requires_grad_()
    loss = dppo_tv(new, seen(log(0.3), torch.tensor([1.0], dtype=torch.float64)), TERMS)
    assert loss.item() == pytest.approx(1e-3 * np.log(3) ** 2)
    (grad,) = torch.autograd.grad(loss.sum(), new)
    assert float(grad) == pytest.approx(2e-3 * np.log(3))


def test_tis_caps_the_weight_and_gives_it_no_gradient():
    new = log(0.9, 0.1).requires_grad_()
    loss = tis(new, seen(log(0.1, 0.2), torch.ones(2, dtype=torch.float64)), TERMS)
    (grad,) = torch.autograd.grad(loss.sum(), new)
    assert grad.tolist() == pytest.approx([-2.0, -0.5])


def test_uncorrected_ignores_the_sampler():
    new = log(0.4).requires_grad_()
    (grad,) = torch.autograd.grad(uncorrected(new, seen(log(0.9), torch.tensor([3.0])), TERMS).sum(), new)
    assert float(grad) == pytest.approx(-3.0)


def test_ratios_of_impossible_tokens_stay_finite():
    new = torch.tensor([-0.01], dtype=torch.float64, requires_grad=True)
    loss = dppo_tv(new, seen(torch.tensor([-2000.0], dtype=torch.float64), torch.tensor([-1.0])), TERMS)
    assert bool(torch.isfinite(loss).all())


def test_an_unknown_correction_is_named_with_the_nearest():
    with pytest.raises(UnknownName, match="'dppo_tv'"):
        policy_loss("dppo")
