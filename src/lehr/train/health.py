"""Numbers that say whether a policy-gradient step is sound."""

from __future__ import annotations

from torch import Tensor

from lehr.train.losses import dppo_keep, log_ratio, sequence_ratios


def policy_health(
    logprobs_N: Tensor, sampled_N: Tensor, advantages_N: Tensor, samples_N: Tensor, *, mask_delta: float | None
) -> dict[str, float]:
    """Return metrics over the loss tokens of one batch; all arguments float32 except ``samples_N``.

    entropy: mean of ``-log p`` of sampled tokens, an estimate. ratio, ratio_max, ratio_sequence: trainer over
    sampler, per token and as the geometric mean per sample. mismatch_kl: mean of ``r - log r - 1`` (k3;
    Schulman 2020, "Approximating KL divergence"). ess: effective sample size as a fraction. masked_up,
    masked_down: fraction of tokens with positive or negative advantage that the trust region dropped.
    """
    change = log_ratio(logprobs_N, sampled_N).double()
    ratio = change.exp()
    found = {
        "entropy": float(-logprobs_N.double().mean()),
        "ratio": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "ratio_sequence": float(sequence_ratios(change, samples_N).mean()),
        "mismatch_kl": float((ratio - change - 1).mean()),
        "ess": float(ratio.sum().square() / ratio.square().sum() / len(ratio)),
        "masked_up": 0.0,
        "masked_down": 0.0,
    }
    if mask_delta is not None:
        dropped = ~dppo_keep(logprobs_N, sampled_N, advantages_N, mask_delta)
        for name, signed in (("masked_up", advantages_N > 0), ("masked_down", advantages_N < 0)):
            if bool(signed.any()):
                found[name] = float(dropped[signed].double().mean())
    return found
