"""E9: in the batch-invariant mode the bits of a request depend on nothing but the request."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from lehr.core.errors import ConfigError
from lehr.core.trace import Constraint, Sampling, Version
from lehr.engine.native import invariant
from lehr.engine.native.engine import NativeEngine
from lehr.engine.native.guides import Mask
from lehr.engine.native.invariant import in_tiles, require_same_in_every_row
from lehr.engine.native.kernels.build import why_not
from lehr.engine.native.kernels.load import kernels_for
from lehr.engine.native.request import Request
from lehr.engine.native.sampler import draw_each
from lehr.engine.native.settings import NativeConfig, SparseConfig
from lehr.engine.native.weights import prepared
from lehr.model.decoder import Decoder
from lehr.model.lora import LowRank
from lehr.model.tiny import random_decoder, tiny_config
from lehr.model.tokenizer import ByteTokenizer

needs_kernels = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")

SHAPE = tiny_config(num_layers=2, hidden_size=576).model_copy(
    update={"num_heads": 9, "num_kv_heads": 3, "head_size": 64, "intermediate_size": 2048}
)
"""Wide enough for a matrix library to sum in another order for another number of rows."""
GREEDY = Sampling(temperature=0, max_tokens=10)
LONG = Sampling(temperature=0, max_tokens=60)
LENGTHS = (3, 61, 300)
ASKED = {
    "greedy": GREEDY,
    "seeded": Sampling(max_tokens=10, seed=4),
    "filtered": Sampling(max_tokens=10, seed=4, top_p=0.8, top_k=50, alternatives=3),
    "constrained": Sampling(max_tokens=10, seed=4, constraint=Constraint("regex", "[a-p ]{40}")),
}
ROUNDED = {"weights": "int8", "kv_dtype": "int8", "draft_tokens": 4}

Said = tuple[list[int], list[float], list[float], list[float], list[Any]]


def made(dtype: torch.dtype, seed: int = 1) -> Decoder:
    return random_decoder(SHAPE, seed=seed, std=0.08, dtype=dtype)


def opened(dtype: torch.dtype, **settings: Any) -> NativeEngine:
    given = {"token_budget": 1024, "max_running": 40, "cache_tokens": 8192, "batch_invariant": True} | settings
    return NativeEngine(made(dtype), config=NativeConfig(**given), tokenizer=ByteTokenizer())


def prompt(length: int, seed: int = 7) -> list[int]:
    source = random.Random(f"{length}/{seed}")
    return [source.randrange(256) for _ in range(length)]


def run(engine: NativeEngine, *requests: Request) -> list[Said]:
    while not engine.idle:
        engine.step()
    assert all(r.error is None and r.own for r in requests)
    return [said(r) for r in requests]


def said(request: Request) -> Said:
    own = request.tokens[request.prompt_length :]
    return own, request.logprobs, request.raw_logprobs, request.kept_mass, request.alternatives


def crowd(engine: NativeEngine, count: int) -> None:
    """Submit others, of many lengths, some of which ask for less and end earlier."""
    for i in range(count):
        engine.submit(prompt(4 + 5 * i, i), Sampling(max_tokens=3 + i % 12, seed=i, top_k=i % 3 * 20))


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(scope="module")
def alone(dtype: torch.dtype) -> Callable[..., list[Said]]:
    """What each prompt gets with nothing beside it, in one piece, from nothing cached."""
    known: dict[str, list[Said]] = {}

    def answer(sampling: Sampling = GREEDY, **settings: Any) -> list[Said]:
        key = repr((sampling, settings))
        if key not in known:
            known[key] = [
                run(engine, engine.submit(prompt(n), sampling))[0]
                for n in LENGTHS
                for engine in [opened(dtype, **settings)]
            ]
        return known[key]

    return answer


@needs_kernels
@pytest.mark.parametrize(("others", "chunk"), [(0, 40), (1, 1024), (6, 16), (14, 333), (37, 64)])
def test_e9_the_batch_and_the_chunks_change_no_bit(
    dtype: torch.dtype, alone: Callable[..., list[Said]], others: int, chunk: int
) -> None:
    engine = opened(dtype, token_budget=chunk)
    crowd(engine, others)
    assert run(engine, *[engine.submit(prompt(n), GREEDY) for n in LENGTHS]) == alone()


@needs_kernels
@pytest.mark.parametrize("asked", [a for a in ASKED if a != "greedy"])
def test_e9_what_is_drawn_with_a_seed_neither(
    dtype: torch.dtype, alone: Callable[..., list[Said]], asked: str
) -> None:
    engine = opened(dtype, token_budget=48)
    crowd(engine, 9)
    requests = [engine.submit(prompt(n), ASKED[asked]) for n in LENGTHS]
    assert run(engine, *requests) == alone(ASKED[asked])


@needs_kernels
def test_e9_what_is_found_in_the_cache_neither(dtype: torch.dtype, alone: Callable[..., list[Said]]) -> None:
    engine = opened(dtype, token_budget=64)
    for common in (20, 150, 299, 300):
        run(engine, engine.submit([*prompt(300)[:common], 1, 2, 3], GREEDY))
        again = engine.submit(prompt(300), GREEDY)
        assert run(engine, again) == alone()[2:]
        assert again.cached_tokens >= common - 8


@needs_kernels
def test_e9_preemption_neither(dtype: torch.dtype, alone: Callable[..., list[Said]]) -> None:
    engine = opened(dtype, token_budget=64, cache_tokens=440)
    for i in range(4):
        engine.submit(prompt(20, i), Sampling(max_tokens=60, seed=i))
    requests = [engine.submit(prompt(n), LONG) for n in LENGTHS]
    ahead = dict.fromkeys(requests, 0)
    sent_back = set[int]()
    while not engine.idle:
        engine.step()
        sent_back |= {r.id for r in requests if r.slot is None and ahead[r] and not r.finished}
        ahead = {r: r.computed for r in requests}
    assert sent_back, "one of those that are compared began again"
    assert [said(r) for r in requests] == alone(LONG)


@needs_kernels
def test_e9_drafts_neither(dtype: torch.dtype, alone: Callable[..., list[Said]]) -> None:
    config = NativeConfig(batch_invariant=True, draft_tokens=6)
    engine = NativeEngine(made(dtype), config=config, draft=made(dtype))
    crowd(engine, 3)
    again = [
        engine.submit([*prompt(n), *alone(LONG)[i][0][:30]], replace(LONG, max_tokens=30))
        for i, n in enumerate(LENGTHS)
    ]
    found = run(engine, *again)
    assert engine.stats().accepted_tokens > 0
    assert [f[0] for f in found] == [s[0][30:] for s in alone(LONG)]
    assert [f[2] for f in found] == [s[2][30:] for s in alone(LONG)]


@needs_kernels
def test_e9_nor_with_bytes_for_weights_keys_and_values(
    dtype: torch.dtype, alone: Callable[..., list[Said]]
) -> None:
    engine = opened(dtype, token_budget=48, **ROUNDED)
    crowd(engine, 21)
    assert run(engine, *[engine.submit(prompt(n), GREEDY) for n in LENGTHS]) == alone(**ROUNDED)


@needs_kernels
def test_e9_nor_what_other_adapters_serve_beside_it(dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(3)

    def adapter(rank: int) -> dict[tuple[int, str], LowRank]:
        down, up = (torch.randn(s, generator=source) * 0.05 for s in ((rank, 2048), (576, rank)))
        return {(layer, "down"): LowRank(down.to(dtype), up.to(dtype)) for layer in range(2)}

    parts = {"a": adapter(3), "b": adapter(16)}

    def engine() -> NativeEngine:
        made = opened(dtype, token_budget=50)
        for name, some in parts.items():
            made.load_adapter(name, some)
        return made

    asked = replace(GREEDY, adapter="a")
    single = [run(e, e.submit(prompt(n), asked))[0] for n in LENGTHS for e in [engine()]]
    many = engine()
    crowd(many, 5)
    for i in range(8):
        many.submit(prompt(12 + i, i), replace(GREEDY, adapter="ab"[i % 2]))
    assert run(many, *[many.submit(prompt(n), asked) for n in LENGTHS]) == single
    assert single != [run(e, e.submit(prompt(n), GREEDY))[0] for n in LENGTHS for e in [engine()]]


def test_e9_a_product_has_the_same_number_of_rows_every_time() -> None:
    seen: list[int] = []

    def compute(x_ND: torch.Tensor) -> torch.Tensor:
        seen.append(len(x_ND))
        return 2 * x_ND

    for rows in (1, 15, 16, 17, 40):
        x_ND = torch.randn(rows, 3)
        assert torch.equal(in_tiles(compute, x_ND, 16), 2 * x_ND)
    assert set(seen) == {16}


@needs_kernels
def test_e9_new_weights_are_laid_out_alike(dtype: torch.dtype) -> None:
    engine, fresh = opened(dtype), NativeEngine(made(dtype, 2), config=NativeConfig(batch_invariant=True))
    engine.offer(Version(0, 1), prepared(made(dtype, 2), "plain", kernels_for(dtype), invariant=True))
    engine.activate(Version(0, 1))
    crowd(engine, 11)
    one = run(fresh, *[fresh.submit(prompt(300), GREEDY)])
    assert run(engine, engine.submit(prompt(300), GREEDY)) == one


@pytest.mark.parametrize("size", [16, 20, 64])
@needs_kernels
def test_the_numbers_are_those_of_plain_operations(size: int) -> None:
    shape = tiny_config(num_layers=3).model_copy(update={"head_size": size, "num_heads": 6})
    found: list[Sequence[float]] = []
    for settings in ({"batch_invariant": True}, {"kernels": False}):
        engine = NativeEngine(
            random_decoder(shape, seed=1, std=0.25), config=NativeConfig(token_budget=64, **settings)
        )
        request = engine.submit(prompt(190), Sampling(temperature=0, max_tokens=20))
        run(engine, request)
        found.append([*request.tokens, *request.raw_logprobs])
    assert np.allclose(found[0], found[1], atol=1e-4)


def test_what_cannot_go_with_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValidationError, match="batch_invariant cannot go with sparse"):
        NativeConfig(batch_invariant=True, sparse=SparseConfig())
    with pytest.raises(ValidationError, match="batch_invariant needs kernels"):
        NativeConfig(batch_invariant=True, kernels=False)
    monkeypatch.setattr(invariant, "why_not", lambda: "there is no C++ compiler")
    with pytest.raises(ConfigError, match="no C\\+\\+ compiler"):
        NativeEngine(random_decoder(tiny_config()), config=NativeConfig(batch_invariant=True))


def test_a_product_that_depends_on_the_place_of_a_row_is_refused() -> None:
    place = torch.arange(16.0)[:, None]
    require_same_in_every_row(lambda x: 2 * x, 8, torch.float32, 16)
    with pytest.raises(ConfigError, match="16 rows of 8 with 8 outputs in float32"):
        require_same_in_every_row(lambda x: x + 1e-6 * place, 8, torch.float32, 16)


def test_the_usual_mode_is_not_batch_invariant() -> None:
    """Or the tests above would prove nothing."""
    found: set[str] = set()
    for others, chunk in ((0, 1024), (14, 333)):
        engine = opened(torch.float32, token_budget=chunk, batch_invariant=False)
        crowd(engine, others)
        found.add(repr(run(engine, *[engine.submit(prompt(n), GREEDY) for n in LENGTHS])))
    assert len(found) == 2


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_e9_rows_of_a_large_vocabulary_are_drawn_alike_alone_and_together() -> None:
    """Torch sums a single row of many words in several threads, and several rows each in one."""
    source = torch.Generator().manual_seed(0)
    logits_NV = 3 * torch.randn(12, 49152, generator=source)
    admitted_NV = torch.rand(12, 49152, generator=source) < 0.5
    where = np.linspace(0.01, 0.99, 12)
    settings = [Sampling(top_p=0.9) if i % 2 else Sampling() for i in range(12)]

    def drawn(rows: range) -> list[Any]:
        mask = Mask(list(range(len(rows))), admitted_NV[list(rows)], frozenset())
        some = [settings[i] for i in rows]
        found = draw_each(None, logits_NV[list(rows)], some, where[list(rows)], mask, alone=True)
        return [found.tokens, found.logprobs, found.raw_logprobs, found.kept_mass]

    each = [drawn(range(i, i + 1)) for i in range(12)]
    assert drawn(range(12)) == [[one[i][0] for one in each] for i in range(4)]
