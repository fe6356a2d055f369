"""Losses agree with float64 computations written from their definitions; advantages keep their laws."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.train.advantages import RunningScale, group_advantages
from lehr.train.losses import (
    POLICY_LOSSES,
    PolicyObjective,
    PolicyTerms,
    PolicyTokens,
    cross_entropy,
    k1,
    k2,
    k3,
    policy_loss,
    sequence_ratios,
)

EXACT = settings(max_examples=40, deadline=None)
probabilities = st.floats(1e-6, 1.0)
advantages = st.floats(-5, 5)
tokens = st.lists(st.tuples(probabilities, probabilities, advantages), min_size=1, max_size=12)


def tensors(rows):
    new, old, gains = (torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))
    return new.log().requires_grad_(), old.log(), gains


def slope(loss, new):
    return torch.autograd.grad(loss.sum(), new)[0].numpy()


@EXACT
@given(tokens)
def test_the_loss_of_sft_agrees_with_its_definition(rows):
    new, _, _ = tensors(rows)
    np.testing.assert_allclose(cross_entropy(new).detach().numpy(), -new.detach().numpy())
    np.testing.assert_allclose(slope(cross_entropy(new), new), -np.ones(len(rows)))


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


# Every policy loss once more, from its definition: one token or one sequence at a time, in plain Python floats;
# slopes by central differences of that definition, with what carries no gradient held where it is.

ROW = st.tuples(probabilities, probabilities, advantages, probabilities, probabilities)
SEQUENCES = st.lists(st.lists(ROW, min_size=1, max_size=5), min_size=1, max_size=4)
CONSTANTS = PolicyTerms(
    gspo_low=0.1, gspo_high=0.2, dual_clip=2.0, tis_cap=1.5, cispo_cap=2.5, behaviour_cap=1.5
)


def known(sequences):
    """Return log-probabilities and what is known beside them, float64, from rows of probabilities."""
    rows = [row for sequence in sequences for row in sequence]
    new, old, gains, reference, proximal = (
        torch.tensor(c, dtype=torch.float64) for c in zip(*rows, strict=True)
    )
    numbers = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor([len(s) for s in sequences]))
    tokens = PolicyTokens(old.log(), gains, 7 * numbers, reference.log(), proximal.log())
    return new.log().requires_grad_(), tokens


def surrogate(ratio, gain, c):
    low, high = 1 - c.clip_low, 1 + c.clip_high
    objective = min(ratio * gain, min(max(ratio, low), high) * gain)
    return -max(objective, c.dual_clip * gain) if gain < 0 and c.dual_clip else -objective


def defined(name, new, held, old, gains, proximal, c):
    """The losses of one sequence; ``held`` is ``new`` where it carries no gradient."""
    ratios = [math.exp(p - q) for p, q in zip(new, old, strict=True)]
    if name == "gspo":
        s = math.exp(sum(p - q for p, q in zip(new, old, strict=True)) / len(new))
        clipped = min(max(s, 1 - c.gspo_low), 1 + c.gspo_high)
        return [-min(s * a, clipped * a) for a in gains]
    found = []
    for p, h, q, a, x, r in zip(new, held, old, gains, proximal, ratios, strict=True):
        if name == "ppo_clip":
            found.append(surrogate(r, a, c))
        elif name == "decoupled_ppo":
            found.append(min(math.exp(x - q), c.behaviour_cap) * surrogate(math.exp(p - x), a, c))
        elif name == "dppo_tv":
            moved = math.exp(h) - math.exp(q)
            keep = not ((a > 0 and moved > c.mask_delta) or (a < 0 and moved < -c.mask_delta))
            found.append(-keep * a * r + c.log_ratio_penalty * (p - q) ** 2)
        elif name in ("tis", "cispo"):
            cap = c.tis_cap if name == "tis" else c.cispo_cap
            found.append(-min(math.exp(h - q), cap) * a * p)
        else:
            found.append(-a * p)
    return found


def per_sequence(tokens, new):
    columns = (new, tokens.sampled_T, tokens.advantages_T, tokens.proximal_T)
    for number in tokens.samples_T.unique():
        at = tokens.samples_T == number
        yield [column.detach()[at].tolist() for column in columns]


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@settings(max_examples=40, deadline=None)
@given(sequences=SEQUENCES)
def test_every_policy_loss_agrees_with_its_definition(name, sequences):
    new, tokens = known(sequences)
    loss = policy_loss(name).function(new, tokens, CONSTANTS)
    expected, slopes, kinked = [], [], False
    for p, q, a, x in per_sequence(tokens, new):
        value = defined(name, p, p, q, a, x, CONSTANTS)
        expected += value
        for i in range(len(p)):
            steps = []
            for h in (1e-6, -1e-6, 2e-6, -2e-6):
                moved = [*p[:i], p[i] + h, *p[i + 1 :]]
                steps.append(sum(defined(name, moved, p, q, a, x, CONSTANTS)))
            slopes.append((steps[0] - steps[1]) / 2e-6)
            size = 1 + max(map(abs, value))
            kinked |= abs(slopes[-1] - (steps[2] - steps[3]) / 4e-6) > 1e-4 * size
    np.testing.assert_allclose(loss.detach().numpy(), expected, rtol=1e-6, atol=1e-6)
    if not kinked:  # at the edge of a clip there is no one slope
        np.testing.assert_allclose(
            slope(loss, new), slopes, rtol=1e-3, atol=1e-3 * (1 + max(map(abs, expected)))
        )


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@settings(max_examples=25, deadline=None)
@given(sequences=SEQUENCES, random=st.randoms(use_true_random=False))
def test_order_and_grouping_of_tokens_change_no_policy_loss(name, sequences, random):
    new, tokens = known(sequences)
    objective = PolicyObjective(policy_loss(name), CONSTANTS, (0.5, 2.0), 0.3, 0.1)
    loss = objective(new, tokens)
    order = list(range(len(new)))
    random.shuffle(order)
    shuffled = PolicyTokens(
        tokens.sampled_T[order],
        tokens.advantages_T[order],
        tokens.samples_T[order],
        tokens.reference_T[order],
        tokens.proximal_T[order],
    )
    torch.testing.assert_close(objective(new[order], shuffled), loss[order])
    alone = torch.cat(
        [
            objective(new[at], tokens_at(tokens, at))
            for number in tokens.samples_T.unique()
            if (at := tokens.samples_T == number) is not None
        ]
    )
    torch.testing.assert_close(alone, loss)


def tokens_at(tokens, at):
    fields = ("sampled_T", "advantages_T", "samples_T", "reference_T", "proximal_T")
    return replace(tokens, **{name: getattr(tokens, name)[at] for name in fields})


@EXACT
@given(SEQUENCES, st.floats(0.5, 0.99), st.floats(1.01, 2.0), st.floats(0.01, 1.0), st.floats(0, 1))
def test_masks_and_penalty_agree_with_their_definitions(sequences, low, high, delta, weight):
    new, tokens = known(sequences)
    plain = policy_loss("none").function(new, tokens, CONSTANTS).detach()
    objective = PolicyObjective(policy_loss("none"), CONSTANTS, (low, high), delta, weight)
    expected, start = [], 0
    for sequence in sequences:
        p, q, a, ref, _ = (np.array(column) for column in zip(*sequence, strict=True))
        mean = np.mean(np.log(p) - np.log(q))
        inside = low <= np.exp(mean) <= high
        for i in range(len(p)):
            keep = inside and not (a[i] < 0 and -mean > delta)
            expected.append(
                keep * float(plain[start + i]) + weight * 0.5 * (np.log(p[i]) - np.log(ref[i])) ** 2
            )
        start += len(p)
    np.testing.assert_allclose(objective(new, tokens).detach().numpy(), expected, rtol=1e-6, atol=1e-6)
    assert objective.coupled and not PolicyObjective(policy_loss("none"), CONSTANTS).coupled


@EXACT
@given(tokens)
def test_divergences_agree_with_their_definitions(rows):
    new, old, _ = tensors(rows)
    x = new.detach().numpy() - old.numpy()
    np.testing.assert_allclose(k1(new, old).detach().numpy(), x, atol=1e-9)
    np.testing.assert_allclose(k2(new, old).detach().numpy(), x**2 / 2, atol=1e-9)
    np.testing.assert_allclose(k3(new, old).detach().numpy(), np.exp(-x) + x - 1, rtol=1e-6, atol=1e-6)


@EXACT
@given(
    st.lists(st.floats(0.05, 1), min_size=2, max_size=6), st.lists(st.floats(0.05, 1), min_size=6, max_size=6)
)
def test_the_estimates_of_a_divergence_are_right_in_expectation(weights, others):
    p = torch.tensor(weights, dtype=torch.float64)
    logits = p.log().requires_grad_()
    log_p = torch.log_softmax(logits, 0)
    log_q = torch.log_softmax(torch.tensor(others[: len(weights)], dtype=torch.float64).log(), 0)
    exact = (log_p.exp() * (log_p - log_q)).sum()
    (wanted,) = torch.autograd.grad(exact, logits, retain_graph=True)
    drawn = log_p.detach().exp()
    for estimate in (k1, k3):
        assert float((drawn * estimate(log_p, log_q)).sum().detach()) == pytest.approx(
            float(exact.detach()), abs=1e-9
        )
    (slope_k2,) = torch.autograd.grad((drawn * k2(log_p, log_q)).sum(), logits, retain_graph=True)
    torch.testing.assert_close(slope_k2, wanted)
    (slope_k1,) = torch.autograd.grad((drawn * k1(log_p, log_q)).sum(), logits)
    assert float(slope_k1.abs().max()) < 1e-9
