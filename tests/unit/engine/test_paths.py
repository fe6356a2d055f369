"""Whatever way a token's keys and values came to be, its log-probability is that of one full forward."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lehr.core.trace import Sampling

HOT = Sampling(temperature=1.0, max_tokens=20, seed=5)


def test_e8_chunked(bench: Any) -> None:
    engine = bench.engine(token_budget=16)
    requests = [engine.submit(bench.prompt(n), HOT) for n in (1, 15, 16, 17, 90, 133)]
    bench.run(engine, *requests)
    assert all(bench.agrees(r) for r in requests)


def test_e8_cached(bench: Any) -> None:
    engine = bench.engine()
    for length in (5, 32, 41):
        first = engine.submit(bench.prompt(length), HOT)
        bench.run(engine, first)
        second = engine.submit(bench.prompt(length), Sampling(max_tokens=20, seed=9))
        longer = engine.submit([*first.tokens, *bench.prompt(7, 1)], HOT)
        bench.run(engine, second, longer)
        assert second.cached_tokens == length - 1, "all but the token whose logits are needed"
        assert longer.cached_tokens >= length + 16
        assert bench.agrees(second) and bench.agrees(longer)


def test_e8_evicted_blocks_are_not_found(bench: Any) -> None:
    engine = bench.engine(cache_tokens=160)
    for seed in range(12):
        request = engine.submit(bench.prompt(60, seed % 4), HOT)
        bench.run(engine, request)
        assert bench.agrees(request)


def test_e8_preempted(bench: Any) -> None:
    engine = bench.engine(cache_tokens=256)
    requests = [engine.submit(bench.prompt(30, i), Sampling(max_tokens=60, seed=i)) for i in range(6)]
    bench.run(engine, *requests)
    assert engine._scheduler.preemptions > 0
    assert all(r.own == 60 and bench.agrees(r) for r in requests)


def test_e10_preemption_does_not_change_what_is_drawn(bench: Any) -> None:
    outcomes = []
    for tokens in (256, 4096):
        engine = bench.engine(cache_tokens=tokens)
        requests = [engine.submit(bench.prompt(30, i), Sampling(max_tokens=60, seed=i)) for i in range(6)]
        bench.run(engine, *requests)
        outcomes.append([r.completion().tokens.tolist() for r in requests])
    assert outcomes[0] == outcomes[1]


def test_a_groups_prompt_is_computed_once(bench: Any) -> None:
    for length in (48, 53):
        engine = bench.engine(max_running=16, token_budget=512)
        group = [engine.submit(bench.prompt(length), Sampling(max_tokens=1, seed=i)) for i in range(8)]
        bench.run(engine, *group)
        assert engine.computed_tokens == length + 7, "the prompt once, and its last token for each other member"
        assert [r.cached_tokens for r in group] == [0] + [length - 1] * 7


def test_e1_new_weights_answer_as_a_fresh_engine(bench: Any, greedy: Sampling) -> None:
    engine = bench.engine(seed=1)
    prompt = bench.prompt(70)
    bench.run(engine, engine.submit(prompt, greedy))
    bench.swap(engine, seed=2)
    after = engine.submit(prompt, greedy)
    fresh_engine = bench.engine(seed=2)
    fresh = fresh_engine.submit(prompt, greedy)
    bench.run(engine, after)
    bench.run(fresh_engine, fresh)
    assert after.cached_tokens == 0
    assert after.tokens == fresh.tokens
    assert np.allclose(after.raw_logprobs, fresh.raw_logprobs, atol=1e-5)


@pytest.mark.parametrize("when", [1, 3, 20])
def test_e3_after_a_flush_nothing_is_found_that_was_computed_before(
    bench: Any, greedy: Sampling, when: int
) -> None:
    """Also of a request that runs on across the flush and would publish its prompt again."""
    engine = bench.engine(token_budget=16)
    prompt = bench.prompt(60)
    bench.run(engine, engine.submit(prompt[:32], greedy))
    running = engine.submit(prompt, Sampling(temperature=0, max_tokens=60))
    for _ in range(when):
        engine.step()
    engine.flush()
    for _ in range(20):
        engine.step()
    again = engine.submit(prompt, greedy)
    assert not running.finished
    bench.run(engine, running, again)
    assert again.cached_tokens == 0
    assert bench.agrees(running) and bench.agrees(again) and running.completion().kv_policy == "exact"


@pytest.mark.parametrize("when", [1, 2, 5])
def test_r4_keys_and_values_never_cross_versions(bench: Any, when: int) -> None:
    """Also while an old request, whose keys and values are kept, runs on beside the new one."""
    engine = bench.engine(seed=1, token_budget=16 if when < 5 else 64)
    prompt = bench.prompt(60)
    old = engine.submit(prompt, Sampling(temperature=0, max_tokens=40))
    for _ in range(when):
        engine.step()
    bench.swap(engine, seed=2)
    new = engine.submit(prompt, Sampling(temperature=0, max_tokens=10))
    bench.run(engine, old, new)
    late = engine.submit(old.tokens, Sampling(temperature=0, max_tokens=3))
    bench.run(engine, late)
    assert bench.agrees(new, seed=2)
    assert bench.agrees(late, seed=2)


def test_e4_recompute_is_exact_under_the_new_weights(bench: Any) -> None:
    engine = bench.engine(seed=1)
    request = engine.submit(bench.prompt(40), Sampling(temperature=0, max_tokens=20))
    for _ in range(8):
        engine.step()
    before = request.own
    bench.swap(engine, seed=2, in_flight="recompute")
    bench.run(engine, request)
    done = request.completion()
    assert done.kv_policy == "exact"
    assert done.versions.tolist() == [0] * before + [1] * (20 - before)
    said = bench.reference(request.tokens, seed=2)[request.prompt_length - 1 :]
    assert np.abs(said[before:] - done.raw_logprobs[before:]).max() < 1e-4


def test_e4_keep_and_abort_say_so(bench: Any) -> None:
    engine = bench.engine(seed=1)
    sampling = Sampling(temperature=0, max_tokens=20)
    kept = engine.submit(bench.prompt(40), sampling)
    for _ in range(8):
        engine.step()
    assert bench.swap(engine, seed=2) == []
    assert kept.own == 8
    engine.step()
    assert bench.swap(engine, seed=3, n=2, in_flight="abort") == [kept]
    done = kept.completion()
    assert done.stop == "abort" and done.kv_policy == "kept_across_versions"
    assert done.versions.tolist() == [0] * 8 + [1]
    assert engine.stats().blocks_held == 0


def test_versions_only_rise(bench: Any) -> None:
    engine = bench.engine()
    bench.swap(engine, seed=2, n=3)
    with pytest.raises(Exception, match="not newer"):
        bench.swap(engine, seed=1, n=2)
    with pytest.raises(Exception, match="were not fetched"):
        engine.activate(type(engine.version)(0, 9))
    assert engine.version.n == 3


def test_score_agrees(bench: Any) -> None:
    engine = bench.engine()
    tokens = bench.prompt(130)
    assert np.abs(engine.score(tokens) - bench.reference(tokens)).max() < 1e-4
    assert np.abs(engine.score(tokens, 0.6) - bench.reference(tokens, 0.6)).max() < 1e-4
    assert engine.score(tokens[:1]).shape == (0,)
