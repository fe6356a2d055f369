"""Gradients and log-probabilities do not depend on packing, order or split."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.core.batch import Sample
from lehr.model.tiny import random_decoder, tiny_config
from lehr.train.gradient import accumulate, score
from lehr.train.losses import PolicyTerms, policy_loss
from lehr.train.packing import pack
from lehr.train.trainer import policy_tokens

DECODER = random_decoder(tiny_config(num_layers=1, hidden_size=32), seed=3, std=0.2)

LOSSES = st.sampled_from(["dppo_tv", "gspo"])


@st.composite
def batches(draw):
    """Groups of samples with a shared start, some of them with several turns."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found = []
    for group in range(draw(st.integers(1, 3))):
        shared = random.integers(0, 256, draw(st.integers(1, 40)))
        for _ in range(draw(st.integers(1, 4))):
            turns = draw(st.lists(st.integers(1, 12), min_size=1, max_size=3))
            tokens, own = [*shared], [False] * len(shared)
            for length in turns:
                tokens += [*random.integers(0, 256, length + 2)]
                own += [True] * length + [False] * 2
            mask = np.asarray(own)
            noise = random.normal(size=(2, len(mask))).astype(np.float32)
            found.append(
                Sample(
                    tokens=np.asarray(tokens, np.int32),
                    own=mask,
                    logprobs=np.where(mask, noise[0] - 5, 0).astype(np.float32),
                    advantages=np.where(mask, noise[1], 0).astype(np.float32),
                    temperature=draw(st.sampled_from([1.0, 0.7])),
                    prefix=draw(st.sampled_from(["", f"g{group}"])),
                )
            )
    return found


def compute(samples, budget, share, loss):
    names = dict(DECODER.named_parameters())
    grads = {name: torch.zeros_like(p) for name, p in names.items()}
    for name, parameter in names.items():
        parameter.grad = grads[name]
    micro = pack(samples, budget, share=share)
    count = sum(len(m.rows) for m in micro)
    logprobs = [None] * len(samples)
    for part in micro:
        known = policy_tokens(part)
        accumulate(
            DECODER,
            part,
            lambda lp, cut, known=known: loss.function(lp, known[cut], PolicyTerms(gspo_low=0.3)) / count,
            grads["embed.weight"],
            grads["embed.weight"],
            coupled=loss.coupled,
        )
        values = score(DECODER, part).numpy()
        for index in np.unique(part.samples):
            logprobs[index] = values[part.samples == index]
    return grads, logprobs


@settings(max_examples=15, deadline=None)
@given(batches(), st.sampled_from([64, 100, 2048]), st.booleans(), LOSSES, st.randoms(use_true_random=False))
def test_packing_order_and_split_change_nothing(samples, budget, share, name, random):
    loss = policy_loss(name)
    grads, logprobs = compute(samples, 4096, False, loss)
    order = list(range(len(samples)))
    random.shuffle(order)
    others, shuffled = compute([samples[i] for i in order], budget, share, loss)
    for position, index in enumerate(order):
        np.testing.assert_allclose(shuffled[position], logprobs[index], atol=1e-5)
    scale = max(float(g.abs().max()) for g in grads.values())
    for name, grad in grads.items():
        torch.testing.assert_close(others[name] / scale, grad / scale, atol=1e-5, rtol=0, msg=name)
