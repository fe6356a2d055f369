"""Losses of pairs and of a critic agree with float64 computations written from their definitions."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.train.losses.critic import value_loss
from lehr.train.losses.preference import Paired, bradley_terry, dpo, ipo, margins

EXACT = settings(max_examples=40, deadline=None)
value = st.floats(-8, 8)
answer = st.lists(value, min_size=1, max_size=7)
pairs = st.lists(st.tuples(answer, answer), min_size=1, max_size=4)
sizes = st.lists(st.floats(-30, 30), min_size=1, max_size=8)


def logistic(x):
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def leaf(numbers):
    return torch.tensor(numbers, dtype=torch.float64, requires_grad=True)


def check(loss, at, expected, slopes):
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-6, atol=1e-6)
    (slope,) = torch.autograd.grad(loss.sum(), at)
    np.testing.assert_allclose(slope.numpy(), slopes, rtol=1e-6, atol=1e-6)


@EXACT
@given(pairs, st.booleans(), st.randoms(use_true_random=False))
def test_margins_are_differences_of_sums_in_any_order_of_tokens(found, mean, random):
    tokens = [(2 * p + side, x) for p, pair in enumerate(found) for side in (0, 1) for x in pair[side]]
    random.shuffle(tokens)
    samples, values = zip(*tokens, strict=True)
    preferred = torch.arange(0, 2 * len(found), 2)
    at = leaf(values)
    got = margins(at, Paired(torch.tensor(samples), preferred, preferred + 1), mean=mean)
    of = np.mean if mean else np.sum
    expected = [of(w) - of(loser) for w, loser in found]
    lengths = [len(found[s // 2][s % 2]) if mean else 1 for s in samples]
    check(got, at, expected, [(1 - 2 * (s % 2)) / n for s, n in zip(samples, lengths, strict=True)])


@EXACT
@given(sizes)
def test_bradley_terry_is_the_negative_log_probability_of_the_label(found):
    at = leaf(found)
    check(bradley_terry(at), at, -np.log(logistic(found)), logistic(found) - 1)


@EXACT
@given(sizes, st.floats(0.01, 1), st.floats(0, 0.4))
def test_dpo_agrees_with_its_definition(found, beta, share):
    at, h = leaf(found), beta * np.asarray(found)
    expected = -(1 - share) * np.log(logistic(h)) - share * np.log(logistic(-h))
    check(dpo(at, beta, share), at, expected, beta * (logistic(h) - (1 - share)))


@EXACT
@given(sizes, st.floats(0.05, 2))
def test_ipo_agrees_with_its_definition(found, beta):
    at, h = leaf(found), np.asarray(found)
    check(ipo(at, beta), at, (h - 0.5 / beta) ** 2, 2 * (h - 0.5 / beta))


@EXACT
@given(st.lists(st.tuples(value, value, value), min_size=1, max_size=9), st.none() | st.floats(0.05, 2))
def test_the_value_loss_agrees_with_its_definition(rows, clip):
    new, old, target = (np.asarray(column) for column in zip(*rows, strict=True))
    at = leaf(new)
    plain = (new - target) ** 2 / 2
    expected, slopes = plain, new - target
    if clip is not None:
        held = old + np.clip(new - old, -clip, clip)
        bound = (held - target) ** 2 / 2
        expected = np.maximum(plain, bound)
        slopes = np.where(bound > plain, np.where(np.abs(new - old) < clip, held - target, 0), new - target)
    loss = value_loss(at, torch.tensor(old), torch.tensor(target), clip)
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-6, atol=1e-6)
    (slope,) = torch.autograd.grad(loss.sum(), at)
    sharp = (
        np.ones(len(new), bool)
        if clip is None
        else (np.abs(bound - plain) > 1e-9) & (np.abs(np.abs(new - old) - clip) > 1e-9)
    )
    np.testing.assert_allclose(slope.numpy()[sharp], slopes[sharp], rtol=1e-6, atol=1e-6)
