"""Losses agree with float64 computations written from their definitions; advantages keep their laws."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.train.advantages import RunningScale, group_advantages
from lehr.train.losses import (
    PolicyTerms,
    PolicyTokens,
    cross_entropy,
    dppo_tv,
    sequence_ratios,
    tis,
    uncorrected,
)

EXACT = settings(max_examples=40, deadline=None)
probabilities = st.floats(1e-6, 1.0)
advantages = st.floats(-5, 5)
tokens = st.lists(st.tuples(probabilities, probabilities, advantages), min_size=1, max_size=12)


def tensors(rows):
    new, old, gains = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    return new.log().requires_grad_(), old.log(), gains


def seen(sampled, advantages):
    return PolicyTokens(sampled, advantages, torch.zeros(len(sampled), dtype=torch.int64))


def slope(loss, new):
    return torch.autograd.grad(loss.sum(), new)[0].numpy()


@EXACT
@given(tokens, st.floats(0.01, 0.9), st.floats(0, 0.1))
def test_dppo_agrees_with_its_definition(rows, delta, penalty):
    new, old, gains = tensors(rows)
    loss = dppo_tv(new, seen(old, gains), PolicyTerms(mask_delta=delta, log_ratio_penalty=penalty))
    expected, slopes = [], []
    for log_p, log_q, gain in zip(new.tolist(), old.tolist(), gains.tolist(), strict=True):
        p, q = np.exp(log_p), np.exp(log_q)
        keep = not ((gain > 0 and p - q > delta) or (gain < 0 and p - q < -delta))
        expected.append(-keep * gain * p / q + penalty * np.log(p / q) ** 2)
        slopes.append(-keep * gain * p / q + 2 * penalty * np.log(p / q))
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(slope(loss, new), slopes, rtol=1e-6, atol=1e-6)


@EXACT
@given(tokens, st.floats(0.5, 10))
def test_tis_agrees_with_its_definition(rows, cap):
    new, old, gains = tensors(rows)
    loss = tis(new, seen(old, gains), PolicyTerms(tis_cap=cap))
    weights = [min(np.exp(p - q), cap) for p, q in zip(new.tolist(), old.tolist(), strict=True)]
    expected = [-w * a * p for w, a, p in zip(weights, gains.tolist(), new.tolist(), strict=True)]
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(slope(loss, new), [-w * a for w, a in zip(weights, gains.tolist(), strict=True)])


@EXACT
@given(tokens)
def test_the_plain_losses_agree_with_their_definitions(rows):
    new, old, gains = tensors(rows)
    np.testing.assert_allclose(slope(cross_entropy(new), new), -np.ones(len(rows)))
    np.testing.assert_allclose(slope(uncorrected(new, seen(old, gains), PolicyTerms()), new), -gains.numpy())


@EXACT
@given(st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=9), min_size=1, max_size=5))
def test_sequence_ratios_are_geometric_means(sequences):
    change = torch.tensor([x for s in sequences for x in s], dtype=torch.float64)
    numbers = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor([len(s) for s in sequences]))
    expected = [np.prod(np.exp(s)) ** (1 / len(s)) for s in sequences]
    np.testing.assert_allclose(sequence_ratios(change, numbers).numpy(), expected, rtol=1e-9)


@EXACT
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16), st.randoms(use_true_random=False))
def test_advantages_sum_to_zero_and_follow_their_members(rewards, random):
    found = group_advantages(rewards)
    assert abs(found.sum()) < 1e-6 * max(1.0, np.abs(rewards).max())
    order = list(range(len(rewards)))
    random.shuffle(order)
    np.testing.assert_allclose(group_advantages([rewards[i] for i in order]), found[order], atol=1e-9)


@EXACT
@given(
    st.lists(st.lists(st.floats(0, 1), min_size=2, max_size=6), min_size=1, max_size=20),
    st.sampled_from([1e-3, 0.1, 10.0, 100.0]),
)
def test_the_scale_makes_units_vanish(groups, factor):
    one, other = RunningScale(), RunningScale()
    for rewards in groups:
        plain, scaled = group_advantages(rewards), group_advantages([factor * r for r in rewards])
        if np.abs(plain).max() <= 1e-9:
            continue  # what rounding leaves is not a signal
        one.update(plain)
        other.update(scaled)
        np.testing.assert_allclose(scaled / other.value, plain / one.value, rtol=1e-6, atol=1e-9)
