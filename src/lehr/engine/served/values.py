"""Log-probabilities as servers report them, and as a completion has them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lehr.core.trace import Completion, Sampling, StopReason
from lehr.engine.base import EngineError

_FLOOR = -9990.0
"""Servers write about -9999 for a value that is not finite, or that they do not have."""


def whole(
    tokens: Sequence[int],
    raw: Sequence[float],
    versions: NDArray[np.int64],
    sampling: Sampling,
    stop: StopReason,
    cached_tokens: int,
) -> Completion:
    """Return the completion of a request without top-k and top-p.

    raw: the log-probability of each token under softmax(logits / temperature), at temperature 0 under
    softmax(logits). At temperature 0 a token is drawn from a set of one, whose mass is that probability.
    """
    values = np.asarray(raw, np.float32)
    if len(values) != len(tokens):
        raise EngineError(f"the server gave {len(values)} log-probabilities for {len(tokens)} tokens")
    if not (np.isfinite(values).all() and (values > _FLOOR).all()):
        raise EngineError(
            f"the server gave log-probabilities down to {values.min()}",
            expected="finite ones",
            hint="Look at the weights: a model whose logits are not finite answers like this.",
        )
    greedy = sampling.temperature == 0
    zeros = np.zeros(len(values), np.float32)
    return Completion(
        tokens=np.asarray(tokens, np.int32),
        logprobs=zeros if greedy else values,
        raw_logprobs=values,
        kept_mass=np.exp(values) if greedy else zeros + 1,
        versions=versions,
        stop=stop,
        cached_tokens=cached_tokens,
    )
