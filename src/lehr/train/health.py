"""Numbers that say whether a policy-gradient step is sound."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lehr.train.losses import PolicyObjective, PolicyTokens, k3, log_ratio, sequence_ratios


def policy_health(
    logprobs_N: Tensor,
    entropy_N: Tensor,
    tokens: PolicyTokens,
    objective: PolicyObjective,
    domains: Sequence[str] = (),
) -> dict[str, float]:
    """Return metrics over the loss tokens of one batch; ``domains`` has that of each sample.

    entropy: mean over tokens, nats. ratio, ratio_max, ratio_sequence: trainer over sampler, per token and as
    the geometric mean per sample. mismatch_kl: mean k3 of trainer and sampler; mismatch_abs and
    mismatch_abs_{p50,p99,max}: mean, median, 99th percentile and maximum of ``|log pi - log mu|``; all of them
    in all and as ``NAME/DOMAIN``. ess: effective sample size as a fraction of the tokens (Kong 1992).
    clipped_up, clipped_down: fraction of tokens with positive or negative advantage on which the bound of the
    loss acts; masked_up, masked_down: of which a sequence mask takes the gradient. reference_kl: mean k3 to the
    reference, where there is one.
    """
    change = log_ratio(logprobs_N, tokens.sampled_T).double()
    ratio = change.exp()
    found = {
        "entropy": float(entropy_N.double().mean()),
        "ratio": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
        "ratio_sequence": float(sequence_ratios(change, tokens.samples_T).mean()),
        "ess": float(ratio.sum().square() / ratio.square().sum() / len(ratio)),
    }
    distance, divergence = change.abs(), k3(tokens.sampled_T.double(), logprobs_N.double())
    found |= _mismatch(distance, divergence, "")
    names = sorted(set(domains))
    if names:
        which_N = torch.tensor([names.index(d) for d in domains])[tokens.samples_T]
        for number, name in enumerate(names):
            there = which_N == number
            if name and bool(there.any()):
                found |= _mismatch(distance[there], divergence[there], f"/{name}")
    if tokens.reference_T is not None:
        found["reference_kl"] = float(k3(logprobs_N.double(), tokens.reference_T.double()).mean())
    bounded = objective.loss.bounded
    clipped = None if bounded is None else bounded(logprobs_N, tokens, objective.terms)
    keep = objective.keep(logprobs_N, tokens)
    masked = None if keep is None else ~keep
    for sign, signed in (("up", tokens.advantages_T > 0), ("down", tokens.advantages_T < 0)):
        for name, hit in (("clipped", clipped), ("masked", masked)):
            there = hit is not None and bool(signed.any())
            found[f"{name}_{sign}"] = float(hit[signed].double().mean()) if hit is not None and there else 0.0
    return found


def _mismatch(distance: Tensor, divergence: Tensor, suffix: str) -> dict[str, float]:
    ordered = distance.sort().values
    last = len(ordered) - 1
    points = {"_p50": last // 2, "_p99": min(last, int(0.99 * len(ordered))), "_max": last}
    found = {f"mismatch_abs{name}{suffix}": float(ordered[at]) for name, at in points.items()}
    return found | {
        f"mismatch_abs{suffix}": float(distance.mean()),
        f"mismatch_kl{suffix}": float(divergence.mean()),
    }
