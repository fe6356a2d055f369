"""Builders of samples, and the plain computation that the trainer is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from lehr.core.batch import Sample
from lehr.model.decoder import Decoder
from lehr.model.tiny import random_decoder, tiny_config


class Samples:
    """Makes samples of the tiny vocabulary from one random stream."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)

    def tokens(self, count: int) -> list[int]:
        """Return ``count`` random ids."""
        return [int(t) for t in self.random.integers(0, 256, count)]

    def one(
        self,
        prompt: Sequence[int],
        *turns: int,
        between: int = 5,
        advantage: float = 1.0,
        logprob: float = -5.0,
        **named: object,
    ) -> Sample:
        """Return a sample with own turns of the given lengths and observations between them."""
        tokens, own = list(prompt), [False] * len(prompt)
        for number, length in enumerate(turns):
            if number:
                tokens += self.tokens(between)
                own += [False] * between
            tokens += self.tokens(length)
            own += [True] * length
        mask = np.asarray(own, np.bool_)
        return Sample(
            tokens=np.asarray(tokens, np.int32),
            own=mask,
            logprobs=np.where(mask, np.float32(logprob), np.float32(0)),
            advantages=np.where(mask, np.float32(advantage), np.float32(0)),
            **named,
        )

    def group(self, name: str, size: int, prompt: int = 20, longest: int = 12, **named: object) -> list[Sample]:
        """Return samples with a shared prompt and advantages that sum to about zero."""
        shared = self.tokens(prompt)
        return [
            self.one(
                shared,
                int(self.random.integers(1, longest + 1)),
                advantage=float(number % 2) - 0.5,
                prefix=name,
                trace_id=f"{name}-{number}",
                **named,
            )
            for number in range(size)
        ]


@pytest.fixture
def samples() -> Samples:
    return Samples()


@pytest.fixture
def decoder() -> Decoder:
    return random_decoder(tiny_config(num_layers=2), seed=1, std=0.15)


def causal(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    mixed = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (query, key, value)), is_causal=True, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)


def plain_logprobs(decoder: Decoder, sample: Sample) -> torch.Tensor:
    """Return the log-probability of each own token, one sample at a time, all logits at once."""
    tokens = torch.from_numpy(sample.tokens.astype(np.int64))
    hidden = decoder.hidden(tokens[:-1], torch.arange(len(tokens) - 1), causal)
    logits = decoder.logits(hidden) / sample.temperature
    found = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
    return found[torch.from_numpy(sample.own[1:].copy())]


@pytest.fixture
def plain() -> Callable[[Decoder, Sample], torch.Tensor]:
    return plain_logprobs
