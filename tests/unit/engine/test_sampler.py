"""What is drawn, and what is said about it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lehr.core.trace import Sampling
from lehr.engine.native.sampler import draw, uniform


def logits(rows: int, vocabulary: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("temperature", [0.5, 0.7, 1.3])
def test_e5_temperature_divides_logits_before_the_softmax(bench: Any, temperature: float) -> None:
    engine = bench.engine()
    sampling = Sampling(temperature=temperature, max_tokens=30, seed=3)
    requests = [engine.submit(bench.prompt(20, i), sampling) for i in range(3)]
    bench.run(engine, *requests)
    for request in requests:
        own = slice(request.prompt_length - 1, None)
        divided_after = bench.reference(request.tokens, 1.0)[own] / temperature
        assert bench.agrees(request)
        assert np.abs(divided_after - request.raw_logprobs).max() > 0.05
        assert np.allclose(request.logprobs, request.raw_logprobs, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_r1_the_ratio_to_a_full_forward_is_one(bench: Any, temperature: float) -> None:
    engine = bench.engine()
    requests = [
        engine.submit(bench.prompt(25, i), Sampling(temperature, max_tokens=30, seed=i)) for i in range(4)
    ]
    bench.run(engine, *requests)
    for request in requests:
        said = bench.reference(request.tokens, temperature)[request.prompt_length - 1 :]
        assert np.abs(np.exp(said - request.completion().logprobs) - 1).max() < 1e-4


@pytest.mark.parametrize(("top_p", "top_k"), [(0.7, 0), (1.0, 5), (0.8, 20), (0.999, 0)])
def test_e6_both_values_and_the_kept_mass(top_p: float, top_k: int) -> None:
    rows, vocabulary = 64, 3000
    scores = logits(rows, vocabulary, spread=0.7 if top_p == 0.999 else 3.0)
    drawn = draw(scores.clone(), [Sampling(0.9, top_p, top_k)] * rows, uniform(range(rows), [0] * rows))
    probabilities = torch.softmax(scores.double() / 0.9, -1)
    for row, token in enumerate(drawn.tokens):
        order = probabilities[row].argsort(descending=True)[: top_k or vocabulary]
        shares = probabilities[row][order] / probabilities[row][order].sum()
        kept = order[(shares.cumsum(0) - shares) < top_p]
        mass = float(probabilities[row][kept].sum())
        assert token in kept.tolist()
        assert drawn.kept_mass[row] == pytest.approx(mass, abs=1e-5)
        assert drawn.raw_logprobs[row] == pytest.approx(float(probabilities[row][token].log()), abs=1e-4)
        assert drawn.logprobs[row] == pytest.approx(drawn.raw_logprobs[row] - np.log(mass), abs=1e-4)


@pytest.mark.parametrize("vocabulary", [7, 256, 1000])
def test_draws_follow_the_distribution(vocabulary: int) -> None:
    rows = 20000
    scores = logits(1, vocabulary, spread=1.5)
    drawn = draw(scores.repeat(rows, 1), [Sampling()] * rows, uniform(range(rows), [3] * rows))
    counts = np.bincount(drawn.tokens, minlength=vocabulary)
    expected = torch.softmax(scores[0].double(), -1).numpy() * rows
    common = expected > 20
    deviations = (counts[common] - expected[common]) / np.sqrt(expected[common])
    assert np.abs(deviations).max() < 5
    assert 0.6 < (deviations**2).mean() < 1.6 or common.sum() < 10


def test_both_ends_of_the_unit_interval_are_possible_tokens() -> None:
    scores = torch.full((2, 600), -1e4)
    scores[:, 300] = scores[:, 301] = 0.0
    drawn = draw(scores, [Sampling()] * 2, np.array([0.0, 1 - 2**-53]))
    assert drawn.tokens == [300, 301]


def test_greedy_takes_the_best_beside_others() -> None:
    scores = logits(3, 500)
    best = scores.argmax(-1).tolist()
    settings = [Sampling(0), Sampling(1.0, seed=1), Sampling(0)]
    drawn = draw(scores.clone(), settings, uniform([1, 2, 3], [0, 0, 0]))
    assert [drawn.tokens[0], drawn.tokens[2]] == [best[0], best[2]]
    assert drawn.logprobs[0] == 0.0
    assert drawn.raw_logprobs[0] == pytest.approx(float(torch.log_softmax(scores[0], -1)[best[0]]), abs=1e-5)
    assert drawn.kept_mass[0] == pytest.approx(np.exp(drawn.raw_logprobs[0]))


def test_the_stream_of_a_request_is_its_own() -> None:
    numbers = uniform([1] * 1000 + [2] * 1000, [*range(1000), *range(1000)])
    assert len(set(numbers.tolist())) == 2000
    assert abs(numbers.mean() - 0.5) < 0.03 and numbers.min() >= 0 and numbers.max() < 1
    assert uniform([7], [5]) == uniform([3, 7], [9, 5])[1]


def test_e19_equal_seeds_draw_alike_in_any_company(bench: Any) -> None:
    alone, crowd = bench.engine(), bench.engine()
    one = alone.submit(bench.prompt(20), Sampling(max_tokens=16, seed=11))
    bench.run(alone, one)
    many = [crowd.submit(bench.prompt(20, i), Sampling(max_tokens=16, seed=11 + i)) for i in range(6)]
    bench.run(crowd, *many)
    assert many[0].tokens == one.tokens
    assert many[0].tokens[20:] != many[1].tokens[20:]
