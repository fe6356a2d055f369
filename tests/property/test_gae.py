"""Advantages of a critic agree with the sum that defines them; whitening and penalties keep their laws."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.train.gae import gae, token_rewards, whitened

EXACT = settings(max_examples=60, deadline=None)
number = st.floats(-5, 5)
rows = st.lists(st.tuples(number, number), min_size=1, max_size=12)
share = st.floats(0, 1)


def by_definition(rewards, values, gamma, lam):
    """The double sum over all pairs of tokens, O(T^2)."""
    length = len(rewards)
    known = [*values, 0.0]
    deltas = [rewards[t] + gamma * known[t + 1] - known[t] for t in range(length)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)]


@EXACT
@given(rows, share, share)
def test_gae_agrees_with_its_definition(found, gamma, lam):
    rewards, values = (np.asarray(column, np.float64) for column in zip(*found, strict=True))
    advantages, returns = gae(rewards, values, gamma=gamma, lam=lam)
    np.testing.assert_allclose(advantages, by_definition(rewards, values, gamma, lam), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(returns, advantages + values)


@EXACT
@given(rows, share)
def test_at_lambda_one_a_return_is_what_came_out_and_at_zero_one_step_ahead(found, gamma):
    rewards, values = (np.asarray(column, np.float64) for column in zip(*found, strict=True))
    out = [sum(gamma**k * r for k, r in enumerate(rewards[t:])) for t in range(len(rewards))]
    np.testing.assert_allclose(gae(rewards, values, gamma=gamma, lam=1)[1], out, atol=1e-9)
    step = rewards + gamma * np.append(values[1:], 0)
    np.testing.assert_allclose(gae(rewards, values, gamma=gamma, lam=0)[1], step, atol=1e-9)


@EXACT
@given(rows, number, share)
def test_the_penalty_is_paid_at_each_token_and_the_reward_at_the_last(found, reward, kl):
    mine, reference = (np.asarray(column, np.float32) for column in zip(*found, strict=True))
    got = token_rewards(reward, mine, reference, kl)
    expected = [-kl * (float(a) - float(b)) for a, b in zip(mine, reference, strict=True)]
    expected[-1] += reward
    np.testing.assert_allclose(got, expected, atol=1e-6)
    np.testing.assert_array_equal(token_rewards(reward, mine, None, kl)[:-1], 0)
    assert token_rewards(reward, mine, None, kl)[-1] == reward


@EXACT
@given(st.lists(st.lists(number, min_size=1, max_size=6), min_size=1, max_size=5))
def test_whitened_advantages_have_mean_zero_and_spread_one_over_all_tokens(found):
    arrays = [np.asarray(one, np.float64) for one in found]
    got = whitened(arrays)
    assert [len(a) for a in got] == [len(a) for a in arrays]
    together, before = np.concatenate(got), np.concatenate(arrays)
    if before.std() > 1e-6:
        assert abs(together.mean()) < 1e-6 and abs(together.std() - 1) < 1e-6
        np.testing.assert_allclose(together * before.std() + before.mean(), before, atol=1e-9)
    elif before.std() < 1e-13:
        np.testing.assert_array_equal(together, 0)
