"""Health of a policy-gradient step against numpy, from the definitions."""

import numpy as np
import pytest
import torch

from lehr.train.head import head_loss
from lehr.train.health import policy_health
from lehr.train.losses import PolicyObjective, PolicyTerms, PolicyTokens, policy_loss


def health(name: str = "ppo_clip", **named):
    random = np.random.default_rng(1)
    new, old = np.log(random.uniform(0.05, 1, (2, 40)))
    gains = random.normal(size=40)
    samples = np.repeat(np.arange(4), 10)
    tokens = PolicyTokens(*(torch.from_numpy(x) for x in (old, gains, samples)), torch.from_numpy(old + 0.1))
    objective = PolicyObjective(policy_loss(name), PolicyTerms(), **named)
    found = policy_health(torch.from_numpy(new), torch.ones(40), tokens, objective, ["a", "b", "a", "b"])
    return new, old, gains, samples, found


def test_metrics_agree_with_their_definitions():
    new, old, gains, samples, found = health()
    r = np.exp(new - old)
    assert found["ratio"] == pytest.approx(r.mean()) and found["ratio_max"] == pytest.approx(r.max())
    assert found["mismatch_kl"] == pytest.approx((r - np.log(r) - 1).mean())
    assert found["ess"] == pytest.approx(r.sum() ** 2 / (r**2).sum() / 40)
    means = [np.exp(np.log(r)[samples == s].mean()) for s in range(4)]
    assert found["ratio_sequence"] == pytest.approx(np.mean(means))
    x = new - (old + 0.1)
    assert found["reference_kl"] == pytest.approx((np.exp(-x) + x - 1).mean())
    distance = np.abs(new - old)
    assert found["mismatch_abs"] == pytest.approx(distance.mean())
    of_b = distance[(samples == 1) | (samples == 3)]
    of_b_r = r[(samples == 1) | (samples == 3)]
    assert found["mismatch_kl/b"] == pytest.approx((of_b_r - np.log(of_b_r) - 1).mean())
    assert found["mismatch_abs/b"] == pytest.approx(of_b.mean())
    assert found["mismatch_abs_p50/b"] == pytest.approx(np.sort(of_b)[9])
    assert found["mismatch_abs_p99/b"] == pytest.approx(np.sort(of_b)[int(0.99 * 20)])
    assert found["mismatch_abs_max/b"] == pytest.approx(of_b.max())
    up, down = gains > 0, gains < 0
    assert found["clipped_up"] == pytest.approx((r[up] > 1.28).mean())
    assert found["clipped_down"] == pytest.approx(((r[down] < 0.8) | (r[down] > 3.0)).mean())
    assert found["masked_up"] == found["masked_down"] == 0.0


def test_masked_tokens_are_counted_by_sign():
    new, old, gains, samples, found = health("none", geometric_mask=(0.9, 1.4))
    means = np.array([np.exp((new - old)[samples == s].mean()) for s in range(4)])
    out = ((means < 0.9) | (means > 1.4))[samples]
    assert 0 < out.mean() < 1
    assert found["masked_up"] == pytest.approx(out[gains > 0].mean())
    assert found["masked_down"] == pytest.approx(out[gains < 0].mean())
    assert found["clipped_up"] == 0.0


def test_a_token_is_told_to_be_bounded_where_its_gradient_is_gone():
    new, old, gains, samples, _ = health()
    for name in ("ppo_clip", "gspo", "decoupled_ppo"):
        loss = policy_loss(name)
        leaf = torch.from_numpy(new).requires_grad_()
        proximal = torch.from_numpy(old + 0.05)
        signs = gains[samples] if loss.coupled else gains  # a sequence has one advantage
        tokens = PolicyTokens(*(torch.from_numpy(x) for x in (old, signs, samples)), None, proximal)
        terms = PolicyTerms(gspo_low=0.1, gspo_high=0.1, behaviour_cap=10.0)
        (slope,) = torch.autograd.grad(loss.function(leaf, tokens, terms).sum(), leaf)
        assert loss.bounded(leaf.detach(), tokens, terms).tolist() == (slope == 0).tolist()


def test_entropy_is_that_of_the_distribution_at_its_temperature():
    source = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(20, 16, generator=source), torch.randn(30, 16, generator=source)
    temperatures = torch.rand(20, generator=source) + 0.5
    found = head_loss(
        hidden, weight, torch.arange(20), temperatures, lambda lp, cut: -lp, torch.zeros_like(weight)
    )
    p = torch.softmax((hidden @ weight.t()).double() / temperatures[:, None].double(), -1)
    torch.testing.assert_close(found.entropy_N.double(), -(p * p.log()).sum(-1), atol=1e-5, rtol=1e-5)
