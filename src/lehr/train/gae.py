"""Generalised advantage estimation, and the rewards of single tokens that it starts from. Plain numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def token_rewards(
    reward: float, logprobs_T: NDArray[np.float32], reference_T: NDArray[np.float32] | None, kl: float
) -> Floats:
    """Return ``-kl * (log pi - log reference)`` of each token, plus ``reward`` at the last (Ouyang et al. 2022,
    arXiv 2203.02155, equation 2, token by token; the difference is the estimate k1 of Schulman 2020,
    "Approximating KL divergence"). Without a reference there is no penalty.
    """
    found = np.zeros(len(logprobs_T))
    if reference_T is not None:
        found -= kl * (logprobs_T.astype(np.float64) - reference_T.astype(np.float64))
    found[-1] += reward
    return found


def gae(rewards_T: Floats, values_T: NDArray[np.float32], *, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Return (advantages, returns), float64 ``[T]``, of one attempt that ends with its last token:

        A_t = sum over l of (gamma lam)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l}),  R_t = A_t + V_t

    (Schulman et al. 2016, arXiv 1506.02438, equation 16), where V of the end is 0: an answer that ran into its
    token limit has ended as well, and was judged as it stands.
    """
    values = np.append(values_T.astype(np.float64), 0.0)
    surprise = rewards_T + gamma * values[1:] - values[:-1]
    advantages = np.zeros(len(rewards_T))
    ahead = 0.0
    for t in range(len(rewards_T) - 1, -1, -1):
        ahead = surprise[t] + gamma * lam * ahead
        advantages[t] = ahead
    return advantages, advantages + values[:-1]


def whitened(advantages: Sequence[Floats]) -> list[Floats]:
    """Return the advantages of a batch, an array per attempt, with mean 0 and variance 1 over all tokens; 0
    everywhere where they do not differ.
    """
    if not advantages:
        return []
    together = np.concatenate(advantages)
    mean, spread = together.mean(), together.std()
    return [(a - mean) / spread if spread > 1e-12 else np.zeros(len(a)) for a in advantages]
