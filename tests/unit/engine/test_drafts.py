"""Speculative decoding: fewer steps, the same tokens, log-probabilities and distribution."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from lehr.core.errors import ConfigError
from lehr.core.trace import Sampling
from lehr.engine.native.drafts import FIRST_WIDTH, PATIENCE, Drafter, Width
from lehr.engine.native.engine import NativeConfig, NativeEngine
from lehr.engine.native.request import Request
from lehr.model.tiny import random_decoder, tiny_config
from lehr.model.tokenizer import ByteTokenizer

PERIOD = [10, 11, 12, 13, 14, 15]
SAMPLES = 1600


def test_a_draft_is_what_followed_the_longest_run_last_time() -> None:
    text = [1, 2, 3, 9, 1, 2, 3]
    assert Drafter(text, Width(8)).draft(3) == [9, 1, 2]
    assert Drafter([*text, 3], Width(8)).draft(3) == []
    assert Drafter([5, 2, 3, 7, 4, 2, 3, 8, 5, 2, 3], Width(8)).draft(1) == [7], (
        "three tokens tell more than two"
    )


def test_a_draft_follows_a_text_that_repeats_itself_beyond_its_end() -> None:
    assert Drafter([7, 7, 7], Width(8)).draft(4) == [7, 7, 7, 7]
    assert Drafter([*PERIOD, *PERIOD[:2]], Width(64, 64)).draft(8) == [12, 13, 14, 15, 10, 11, 12, 13]


def test_drafts_grow_while_accepted_and_cease_where_wrong() -> None:
    text = [*PERIOD, *PERIOD]
    drafter = Drafter(text, Width(16))
    assert len(drafter.draft(64)) == FIRST_WIDTH
    drafter.learn(FIRST_WIDTH, FIRST_WIDTH)
    assert len(drafter.draft(64)) == 2 * FIRST_WIDTH
    drafter.learn(2 * FIRST_WIDTH, 0)
    assert drafter.draft(64) == []
    text += (PERIOD * 3)[:PATIENCE]
    assert len(drafter.draft(64)) == 1


class Oracle:
    """Drafts what a plain run sampled, with a wrong token at every ``wrong_at``-th place."""

    def __init__(self, request: Request, whole: list[int], wrong_at: int = 7) -> None:
        self._request, self._whole, self._wrong_at = request, whole, wrong_at
        self.learnt: list[tuple[int, int]] = []

    def draft(self, room: int) -> list[int]:
        start = len(self._request.tokens)
        places = range(start, min(start + max(0, min(room, 5)), len(self._whole)))
        return [(self._whole[i] + (i % self._wrong_at == 0)) % 256 for i in places]

    def learn(self, drafted: int, accepted: int) -> None:
        self.learnt.append((drafted, accepted))

    def close(self) -> None:
        pass


def plain(bench: Any, prompt: list[int], sampling: Sampling, **settings: Any) -> Request:
    engine = bench.engine(**settings)
    request = engine.submit(prompt, sampling)
    bench.run(engine, request)
    return request


SAMPLINGS = [
    Sampling(temperature=0.0, max_tokens=60),
    Sampling(temperature=0.5, max_tokens=60, seed=3),
    Sampling(temperature=1.0, max_tokens=60, seed=5, top_p=0.7, top_k=9),
]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_e7_drafts_change_the_number_of_steps_alone(bench: Any, sampling: Sampling) -> None:
    prompt = bench.prompt(30)
    one = plain(bench, prompt, sampling)
    engine = bench.engine()
    other = engine.submit(prompt, sampling)
    oracle = Oracle(other, one.tokens)
    other.drafter = oracle
    bench.run(engine, other)
    assert other.tokens == one.tokens and other.stop == one.stop == "length"
    assert bench.agrees(other), "the log-probabilities are the target's"
    assert np.allclose(other.completion().logprobs, one.completion().logprobs, atol=1e-4)
    assert np.allclose(other.completion().kept_mass, one.completion().kept_mass, atol=1e-4)
    stats = engine.stats()
    assert stats.own_tokens == 60 and stats.steps == 60 - stats.accepted_tokens
    assert 0.4 * stats.drafted_tokens < stats.accepted_tokens < stats.drafted_tokens
    assert stats.accepted_tokens == sum(accepted for _, accepted in oracle.learnt)


def test_requests_with_and_without_drafts_share_steps(bench: Any) -> None:
    sampling = Sampling(temperature=0.7, max_tokens=40, seed=8)
    prompts = [bench.prompt(length, 3) for length in (5, 30, 70, 8)]
    whole = [plain(bench, prompt, sampling).tokens for prompt in prompts]
    engine = bench.engine()
    requests = [engine.submit(prompt, sampling) for prompt in prompts]
    for number, request in enumerate(requests):
        if number % 2:
            request.drafter = Oracle(request, whole[number], 4 + number)
    bench.run(engine, *requests)
    assert [r.tokens for r in requests] == whole
    assert all(bench.agrees(request) for request in requests)


def test_a_drafted_token_ends_a_completion_as_any_other(bench: Any) -> None:
    prompt, sampling = bench.prompt(30), Sampling(temperature=0, max_tokens=60)
    whole = plain(bench, prompt, sampling).tokens
    for place in (31, 33, 37, 52):
        stop = (whole[place],)
        one = plain(bench, prompt, sampling, stop_ids=stop)
        engine = bench.engine(stop_ids=stop)
        other = engine.submit(prompt, sampling)
        other.drafter = Oracle(other, whole, 1000)
        bench.run(engine, other)
        assert other.tokens == one.tokens and other.stop == one.stop == "eos"
        assert len(other.versions) == len(other.logprobs) == other.own
        assert engine.stats().blocks_held == 0 and engine._scheduler.pool.audit() == []


def test_drafts_never_pass_the_length_that_was_asked_for(bench: Any) -> None:
    prompt = bench.prompt(30)
    whole = plain(bench, prompt, Sampling(temperature=0, max_tokens=40)).tokens
    for most in range(1, 12):
        engine = bench.engine()
        request = engine.submit(prompt, Sampling(temperature=0, max_tokens=most))
        request.drafter = Oracle(request, whole, 1000)
        bench.run(engine, request)
        assert request.tokens == whole[: 30 + most] and request.stop == "length"


def test_drafts_send_no_request_back(bench: Any) -> None:
    """Where blocks are short, requests go without drafts."""
    sampling = Sampling(temperature=0, max_tokens=40)
    prompts = [bench.prompt(40 + n, n) for n in range(3)]
    whole = [plain(bench, prompt, sampling).tokens for prompt in prompts]
    engine = bench.engine(cache_tokens=176)
    requests = [engine.submit(prompt, sampling) for prompt in prompts]
    for request, tokens in zip(requests, whole, strict=True):
        request.drafter = Oracle(request, tokens)
    bench.run(engine, *requests, after_step=lambda _: engine._scheduler.pool.audit() == [] or pytest.fail())
    assert engine._scheduler.preemptions > 0, "blocks are short"
    assert [r.tokens for r in requests] == whole and engine.stats().blocks_held == 0


def test_what_was_accepted_is_found_by_the_next_turn(bench: Any) -> None:
    prompt, sampling = bench.prompt(30), Sampling(temperature=0, max_tokens=50)
    whole = plain(bench, prompt, sampling).tokens
    engine = bench.engine()
    first = engine.submit(prompt, sampling)
    first.drafter = Oracle(first, whole, 5)
    bench.run(engine, first)
    second = engine.submit([*first.tokens, *bench.prompt(5, 9)], Sampling(temperature=0, max_tokens=4))
    bench.run(engine, second)
    assert second.cached_tokens >= len(first.tokens) - 1
    assert bench.agrees(second), "keys of a rejected draft are nowhere"


def test_weights_change_while_drafts_run(bench: Any) -> None:
    prompt, sampling = bench.prompt(30), Sampling(temperature=0, max_tokens=50)
    whole = plain(bench, prompt, sampling).tokens
    engine = bench.engine()
    request = engine.submit(prompt, sampling)
    request.drafter = Oracle(request, whole)
    for _ in range(6):
        engine.step()
    before = request.own
    bench.swap(engine, 2, in_flight="recompute")
    bench.run(engine, request)
    assert 6 < before < 50 and request.tokens[: 30 + before] == whole[: 30 + before]
    said = bench.reference(request.tokens, seed=2)[29 + before :]
    assert np.abs(said - request.completion().raw_logprobs[before:]).max() < 1e-4


def test_an_engine_with_drafts_looks_them_up(bench: Any) -> None:
    sampling = Sampling(temperature=0, max_tokens=24)
    prompt = bench.prompt(30)
    own = plain(bench, prompt, sampling).tokens[30:]
    engine = bench.engine(draft_tokens=8)
    request = engine.submit([*own, *prompt], sampling)
    bench.run(engine, request)
    assert request.drafter is not None and bench.agrees(request)


def test_drafts_keep_the_distribution(bench: Any) -> None:
    """Chi-square (two samples of equal size) over the pairs that requests sample, with and without drafts."""
    prompt, sampling = bench.prompt(12), Sampling(temperature=0.35, max_tokens=3)
    whole = plain(bench, prompt, dataclasses.replace(sampling, temperature=0.0)).tokens
    counts: list[Counter[tuple[int, ...]]] = []
    for drafting in (False, True):
        engine = bench.engine()
        seen: Counter[tuple[int, ...]] = Counter()
        for start in range(0, SAMPLES, 8):
            seeds = range(start + SAMPLES * drafting, start + SAMPLES * drafting + 8)  # no stream is used twice
            requests = [engine.submit(prompt, dataclasses.replace(sampling, seed=seed)) for seed in seeds]
            for request in requests:
                request.drafter = Oracle(request, whole, 1000) if drafting else None
            bench.run(engine, *requests)
            seen.update(tuple(r.tokens[r.prompt_length + 1 :]) for r in requests)
        counts.append(seen)
    stats = engine.stats()
    assert 0.1 < stats.accepted_tokens / stats.drafted_tokens < 0.9
    frequent = [key for key in counts[0] | counts[1] if counts[0][key] + counts[1][key] >= 20]
    rare = [sum(c.values()) - sum(c[key] for key in frequent) for c in counts]
    pairs = [(counts[0][key], counts[1][key]) for key in frequent] + [(rare[0], rare[1])]
    chi = sum((a - b) ** 2 / (a + b) for a, b in pairs)
    degrees = len(pairs) - 1
    assert degrees >= 4 and chi < degrees + 4 * (2 * degrees) ** 0.5, (chi, degrees)


def with_draft_model(bench: Any, seed: int, **settings: Any) -> NativeEngine:
    config = NativeConfig(token_budget=64, max_running=8, cache_tokens=4096, draft_tokens=6, **settings)
    return NativeEngine(bench.decoder(), config=config, tokenizer=ByteTokenizer(), draft=bench.decoder(seed))


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_model_that_drafts_for_itself_is_always_right(bench: Any, sampling: Sampling, kernels: bool) -> None:
    prompt = bench.prompt(30)
    one = plain(bench, prompt, sampling)
    engine = with_draft_model(bench, seed=1, kernels=kernels)
    other = engine.submit(prompt, sampling)
    bench.run(engine, other)
    assert other.tokens == one.tokens and bench.agrees(other)
    stats = engine.stats()
    assert stats.accepted_tokens >= 0.9 * stats.drafted_tokens > 30
    assert stats.steps < 25


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_another_draft_model_changes_the_number_of_steps_alone(bench: Any, sampling: Sampling) -> None:
    prompts = [bench.prompt(length, 3) for length in (5, 30, 70)]
    whole = [plain(bench, prompt, sampling).tokens for prompt in prompts]
    engine = with_draft_model(bench, seed=2)
    requests = [engine.submit(prompt, sampling) for prompt in prompts]
    gone = engine.submit(bench.prompt(20), sampling)
    bench.run(engine, *requests, gone, after_step=lambda n: engine.cancel(gone) if n == 9 else None)
    assert [r.tokens for r in requests] == whole
    assert engine.stats().drafted_tokens > 0
    assert engine._draft is not None
    assert not any(lane.slots for lane in engine._draft.rows.lanes.values()), "rows of the draft model are free"


def test_a_draft_model_of_another_vocabulary_is_refused(bench: Any) -> None:
    other = random_decoder(tiny_config(vocab_size=300, num_layers=1))
    with pytest.raises(ConfigError, match="300 tokens and the model 264"):
        NativeEngine(bench.decoder(), config=NativeConfig(draft_tokens=2), draft=other)
    with pytest.raises(ValidationError, match="needs draft_tokens"):
        NativeConfig(draft_model="smollm2-135m")
