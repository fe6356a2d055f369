"""Edges: what fits, what ends a request, what is freed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lehr.core.trace import Sampling, Version
from lehr.engine.base import EngineError, RequestTooLarge
from lehr.engine.bounds import packed_ids
from lehr.engine.native.packing import pack
from lehr.engine.native.stops import cut, find_stop
from lehr.model.tokenizer import ByteTokenizer


def test_e11_a_request_that_can_never_fit_fails_alone(bench: Any) -> None:
    engine = bench.engine(cache_tokens=128)
    running = engine.submit(bench.prompt(30), Sampling(max_tokens=30, seed=1))
    engine.step()
    with pytest.raises(RequestTooLarge, match="at most 128 together"):
        engine.submit(bench.prompt(100), Sampling(max_tokens=29))
    fits = engine.submit(bench.prompt(100), Sampling(max_tokens=28, seed=1))
    bench.run(engine, running, fits)
    assert running.own == 30 and fits.own == 28


def test_e11_positions_are_a_limit_too(bench: Any) -> None:
    engine = bench.engine(cache_tokens=8192)
    with pytest.raises(RequestTooLarge, match="at most 2048 together"):
        engine.submit(bench.prompt(2000), Sampling(max_tokens=49))


@pytest.mark.parametrize("cache_tokens", [160, 256, 4096])
def test_e13_blocks_add_up_after_every_step(bench: Any, cache_tokens: int) -> None:
    engine = bench.engine(cache_tokens=cache_tokens, token_budget=32)
    requests = [engine.submit(bench.prompt(20 + i, i % 3), Sampling(max_tokens=40, seed=i)) for i in range(9)]

    def audit(number: int) -> None:
        stats = engine.stats()
        assert stats.blocks_free + stats.blocks_cached + stats.blocks_held == stats.blocks_total
        held = {b for r in engine._scheduler.running for b in r.blocks}
        assert stats.blocks_held == len(held)
        assert engine._scheduler.pool.audit() == []
        if number % 7 == 0 and engine.live():
            engine.cancel(engine.live()[number % len(engine.live())])

    bench.run(engine, *requests, after_step=audit)
    assert engine.stats().blocks_held == 0


def test_a_cancelled_request_frees_its_blocks_at_once(bench: Any) -> None:
    engine = bench.engine()
    first, second = (engine.submit(bench.prompt(40, i), Sampling(max_tokens=50, seed=i)) for i in range(2))
    for _ in range(4):
        engine.step()
    engine.cancel(first)
    assert engine.stats().running == 1 and engine.stats().blocks_held == len(second.blocks)
    done = first.completion()
    assert done.stop == "abort" and len(done.tokens) == first.own > 0
    bench.run(engine, second)
    assert bench.agrees(second)


def sampled_text(bench: Any, **settings: Any) -> tuple[bytes, Any]:
    engine = bench.engine()
    request = engine.submit(bench.prompt(20), Sampling(temperature=0, max_tokens=40, **settings))
    bench.run(engine, request)
    return b"".join(map(ByteTokenizer().token_bytes, request.tokens[20:])), request


def printable_pair(text: bytes) -> int:
    """Return where two neighbouring ASCII bytes first stand."""
    return next(i for i in range(4, len(text) - 1) if text[i] < 128 and text[i + 1] < 128)


def test_e16_a_stop_may_span_tokens_and_ends_the_request_at_its_last_one(bench: Any) -> None:
    text, _ = sampled_text(bench)
    at = printable_pair(text)
    stop = text[at : at + 2].decode()
    end = text.find(stop.encode()) + 2
    stopped_text, request = sampled_text(bench, stop=(stop,))
    assert request.completion().stop == "stop"
    assert stopped_text == text[:end]


def test_e16_the_leftmost_stop_wins() -> None:
    assert find_stop(b"one two three", [b"three", b"two", b"tw"]) == (4, b"two")
    assert cut("a STOP b END c", ("END", "STOP")) == "a "
    assert cut("no stop", ("END",)) == "no stop"
    assert cut("é END", ("END", "")) == "é "


def test_e16_of_two_stops_the_first_to_be_complete_ends_it(bench: Any) -> None:
    text, _ = sampled_text(bench)
    at = printable_pair(text)
    early, late = text[at : at + 1].decode(), text[at : at + 2].decode()
    first = text.find(early.encode()) + 1
    stopped_text, _ = sampled_text(bench, stop=(late, early))
    assert stopped_text == text[:first]


def test_stop_strings_without_a_tokenizer_are_refused(bench: Any) -> None:
    engine = bench.engine()
    engine._tokenizer = None
    with pytest.raises(EngineError, match="need a tokenizer"):
        engine.submit([1], Sampling(stop=("x",)))


def test_end_of_sequence_is_the_last_token(bench: Any) -> None:
    _, request = sampled_text(bench)
    end = request.tokens[25]
    engine = bench.engine(stop_ids=(end,))
    again = engine.submit(bench.prompt(20), Sampling(temperature=0, max_tokens=40))
    bench.run(engine, again)
    assert again.stop == "eos"
    assert again.tokens == request.tokens[: request.tokens.index(end, 20) + 1]


def test_nothing_and_nonsense(bench: Any) -> None:
    engine = bench.engine()
    nothing = engine.submit([5], Sampling(max_tokens=0))
    assert nothing.finished and nothing.completion().stop == "length" and len(nothing.completion().tokens) == 0
    for tokens, sampling in (
        ([], Sampling()),
        ([264], Sampling()),
        ([-1], Sampling()),
        ([1], Sampling(temperature=-1)),
        ([1], Sampling(top_p=0)),
        ([1], Sampling(top_k=-2)),
    ):
        with pytest.raises(EngineError):
            engine.submit(tokens, sampling)
    assert engine.idle and engine.step() == []


NAN, INFINITE = float("nan"), float("inf")
UNUSABLE: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (NAN, INFINITE, -0.5, 1e-40, 1e-300, "hot", None)),
    *(("top_p", value) for value in (NAN, 0, -1, 1.5, None)),
    *(("top_k", value) for value in (1 << 63, 10**30, -1, 1.5, NAN)),
    *(("max_tokens", value) for value in (NAN, 2.5, -1, "3", None)),
    *(("alternatives", value) for value in (-1, 1.5, NAN)),
    *(("seed", value) for value in (1.5, NAN, "a")),
    *(("stop", value) for value in ("abc", (3,), ("\ud800",), (b"a",))),
    *(("adapter", value) for value in (None, 3)),
    ("constraint", "x"),
]


@pytest.mark.parametrize(("name", "value"), UNUSABLE)
def test_what_no_step_could_draw_with_is_refused_and_others_go_on(bench: Any, name: str, value: Any) -> None:
    engine = bench.engine()
    other = engine.submit(bench.prompt(20), Sampling(max_tokens=3, seed=1))
    sampling = Sampling(**{"max_tokens": 4, name: value})
    with pytest.raises(EngineError, match=f"cannot sample with {name}="):
        engine.submit([1, 2], sampling)
    bench.run(engine, other)
    assert bench.agrees(other)


@pytest.mark.parametrize("tokens", [[1.5], [NAN], ["a"], [None], [[1]], [10**12], [-1]])
def test_only_token_ids_are_a_prompt_and_a_text_to_score(bench: Any, tokens: Any) -> None:
    engine = bench.engine()
    for ask in (lambda: engine.submit(tokens, Sampling()), lambda: engine.score([1, *tokens])):
        with pytest.raises(EngineError, match=r"not a sequence of token ids|outside the vocabulary"):
            ask()
    with pytest.raises(EngineError, match=r"not a sequence of token ids|outside any vocabulary") as caught:
        packed_ids([*tokens, 1 << 40])
    assert caught.value.expected


@pytest.mark.parametrize("temperature", [NAN, INFINITE, -1.0, 1e-40])
def test_a_temperature_that_nothing_is_scored_at_is_refused(bench: Any, temperature: float) -> None:
    with pytest.raises(EngineError, match="cannot score at temperature="):
        bench.engine().score([1, 2, 3], temperature)


def test_numbers_of_numpy_are_numbers(bench: Any) -> None:
    engine = bench.engine()
    mine, theirs = (
        engine.submit(tokens, Sampling(temperature=warm, max_tokens=many, seed=seed, top_k=few))
        for tokens, warm, many, seed, few in (
            ([1, 2], 0.5, 4, -7, 50),
            (np.array([1, 2]), np.float32(0.5), np.int64(4), np.int64(-7), np.int32(50)),
        )
    )
    bench.run(engine, mine, theirs)
    assert mine.tokens == theirs.tokens


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, 1e6])
@pytest.mark.parametrize("more", [{}, {"top_k": 3}, {"top_p": 0.5}])
def test_the_ends_of_the_scale_of_temperatures_can_be_drawn_at(
    bench: Any, temperature: float, more: dict[str, Any]
) -> None:
    engine = bench.engine()
    request = engine.submit(bench.prompt(20), Sampling(temperature=temperature, max_tokens=6, seed=1, **more))
    bench.run(engine, request)
    done = request.completion()
    assert np.isfinite(done.logprobs).all() and np.isfinite(done.raw_logprobs).all()
    assert (done.logprobs <= 1e-6).all() and (done.kept_mass > 0).all()


def test_logits_that_are_not_finite_are_a_fault_of_the_engine_and_no_answer(bench: Any) -> None:
    engine = bench.engine()
    broken = bench.decoder()
    with torch.no_grad():
        for parameter in broken.parameters():
            parameter.mul_(float("nan"))
    engine.offer(Version(0, 1), pack(broken))
    engine.activate(Version(0, 1))
    engine.submit(bench.prompt(9), Sampling(max_tokens=4))
    with pytest.raises(EngineError, match="gives logits that are not finite"):
        engine.step()
