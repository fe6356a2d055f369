"""Constraints: what is said is admitted, what is drawn follows the model, and nothing else is touched."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from lehr.core.trace import Constraint, Sampling
from lehr.engine.base import BadConstraint, EngineError
from lehr.engine.native.engine import NativeEngine
from lehr.engine.native.guides import Grammars, Mask
from lehr.engine.native.request import Request
from lehr.engine.native.sampler import draw, draw_each, likeliest, uniform
from lehr.engine.native.settings import NativeConfig
from lehr.model.tiny import random_decoder, tiny_config
from lehr.model.tokenizer import ByteTokenizer, HfTokenizer

END = ByteTokenizer.IM_END
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 3},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue", 3, None]}, "maxItems": 2},
        "at": {"type": "object", "properties": {"x": {"type": "boolean"}}, "additionalProperties": False},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def schema(value: Any) -> Constraint:
    return Constraint("schema", json.dumps(value))


def regex(text: str) -> Constraint:
    return Constraint("regex", text)


def said(request: Request) -> bytes:
    return bytes(t for t in request.tokens[request.prompt_length :] if t < 256)


def sampled(bench: Any, constraint: Constraint, **settings: Any) -> Request:
    engine = bench.engine(stop_ids=(END,))
    request = engine.submit(bench.prompt(12), Sampling(constraint=constraint, **settings))
    bench.run(engine, request)
    return request


def test_what_is_said_validates(bench: Any) -> None:
    temperature = 0.9
    engine = bench.engine(stop_ids=(END,))
    requests = [
        engine.submit(
            bench.prompt(9, i), Sampling(temperature, max_tokens=600, seed=i, constraint=schema(PERSON))
        )
        for i in range(4)
    ]
    bench.run(engine, *requests)
    for request in requests:
        assert request.error is None and request.stop == "eos" and request.tokens[-1] == END
        jsonschema.validate(json.loads(said(request)), PERSON)
        assert bench.agrees(request), "raw log-probabilities know nothing of the constraint"


leaf = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(lambda v: {"const": v}, st.sampled_from(["é", 'a"b\\', 7, -0.5, [1, {"k": None}]])),
    st.builds(lambda v: {"enum": v}, st.lists(st.text(max_size=4), min_size=1, max_size=3, unique=True)),
    st.builds(
        lambda a, b: {"type": "integer", "minimum": a, "maximum": a + b},
        st.integers(-50, 50),
        st.integers(0, 99),
    ),
    st.builds(
        lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-c]{2,3}-[0-9]$"},
            {"type": "string", "format": "date"},
            {"type": ["integer", "null"], "minimum": 10, "maximum": 99},
        ]
    ),
)
any_schema = st.recursive(
    leaf,
    lambda inner: st.one_of(
        st.builds(
            lambda i, n: {"type": "array", "items": i, "minItems": n, "maxItems": n + 1},
            inner,
            st.integers(0, 2),
        ),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(
            lambda parts, few: {
                "type": "object",
                "properties": parts,
                "required": sorted(parts)[:few],
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b b", "ü", 'q"']), inner, max_size=3),
            st.integers(0, 3),
        ),
    ),
    max_leaves=5,
)


def walk(grammars: Grammars, constraint: Constraint, end: int, seed: int) -> list[int] | None:
    """Return admitted tokens drawn at random, the end last, or None where there were too many before an end."""
    draw = np.random.default_rng(seed)
    guide = grammars.guide(constraint)
    tokens: list[int] = []
    while len(tokens) < 500:
        options = grammars.mask([(0, guide, ())]).allowed_MV[0].nonzero()[:, 0].numpy()
        some = options[~np.isin(options, list(b" \t\r\n"))] if draw.random() < 0.8 else options
        tokens.append(int(draw.choice(some if len(some) else options)))
        if tokens[-1] == end or (end in options and draw.random() < 0.3):
            return [*tokens[:-1], end]
        guide.follow(tokens, 0)
    return None


BYTES = Grammars(ByteTokenizer(), 264, {END})


@settings(max_examples=60, deadline=None)
@given(wanted=any_schema, seed=st.integers(0, 3))
def test_any_schema_is_held_to(wanted: dict[str, Any], seed: int) -> None:
    tokens = walk(BYTES, schema(wanted), END, seed)
    if tokens is not None:
        jsonschema.validate(json.loads(bytes(tokens[:-1])), wanted)


def test_any_object_is_an_object(bench: Any) -> None:
    engine = bench.engine(stop_ids=(END,), max_running=16)
    sampling = Sampling(max_tokens=120, constraint=Constraint("json"))
    requests = [engine.submit(bench.prompt(9, i), dataclasses.replace(sampling, seed=i)) for i in range(16)]
    bench.run(engine, *requests)
    ended = [request for request in requests if request.stop == "eos"]
    assert len(ended) > 2 and all(isinstance(json.loads(said(request)), dict) for request in ended)


def test_a_regular_expression_and_a_grammar(bench: Any) -> None:
    for seed in range(4):
        assert re.fullmatch(
            rb"[a-d]{3}(-[0-9]+){0,3}!", said(sampled(bench, regex(r"[a-d]{3}(-[0-9]+){0,3}!"), seed=seed))
        )
        balanced = said(
            sampled(bench, Constraint("grammar", 'start: "x" | "(" start ")"'), max_tokens=400, seed=seed)
        )
        assert re.fullmatch(rb"\(*x\)*", balanced) and balanced.count(b"(") == balanced.count(b")")


def test_the_distribution_is_that_of_drawing_until_a_token_is_admitted(bench: Any) -> None:
    """At each position: softmax, given that the token is admitted; the end where the text is whole."""
    prompt, samples, temperature = bench.prompt(12), 1500, 0.8
    texts = [b"c", b"d", b"aa", b"ae", b"ba", b"be", b"a", b"b"]
    allowed = {b"": b"abcd", b"a": b"ae", b"b": b"ae"}
    shares = {text: 1.0 for text in texts}
    raw = {text: 0.0 for text in texts}
    for text in texts:
        for at in range(len(text) + 1):
            before, after = text[:at], text[at : at + 1]
            options = [*allowed.get(before, b""), *([END] if before in texts else [])]
            scores = [bench.reference([*prompt, *before, o], temperature)[-1] for o in options]  # log-softmax
            drawn = after[0] if after else END
            shares[text] *= np.exp(scores[options.index(drawn)]) / np.exp(scores).sum()
            raw[text] += scores[options.index(drawn)]
    assert sum(shares.values()) == pytest.approx(1)
    engine = bench.engine(stop_ids=(END,), max_running=64, token_budget=512)
    sampling = Sampling(temperature, max_tokens=9, constraint=regex("c|d|(a|b)(a|e)?"))
    requests = [engine.submit(prompt, dataclasses.replace(sampling, seed=i)) for i in range(samples)]
    bench.run(engine, *requests)
    counts = Counter(map(said, requests))
    assert set(counts) <= set(texts)
    squares = sum((counts[t] - samples * p) ** 2 / (samples * p) for t, p in shares.items() if p * samples > 5)
    assert squares < 26.1, (counts, shares)  # chi-square, 7 degrees of freedom: 0.05 % of sound runs exceed it
    for request in requests[:50]:
        done = request.completion()
        assert done.logprobs.sum() == pytest.approx(np.log(shares[said(request)]), abs=1e-3)
        assert done.raw_logprobs.sum() == pytest.approx(raw[said(request)], abs=1e-3)
        assert np.allclose(done.logprobs, done.raw_logprobs - np.log(done.kept_mass), atol=1e-4)


def mask_of(rows: list[int], allowed: torch.Tensor) -> Mask:
    return Mask(rows, allowed, frozenset())


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.7, 0), (1.0, 5), (0.8, 20)])
def test_e6_the_constraint_comes_before_top_k_and_top_p(top_p: float, top_k: int) -> None:
    rows, vocabulary = 32, 3000
    source = torch.Generator().manual_seed(3)
    scores = torch.randn(rows, vocabulary, generator=source) * 3
    allowed = torch.rand(rows, vocabulary, generator=source) < 0.3
    settings = [Sampling(0.9, top_p, top_k)] * rows
    drawn = draw(
        scores.clone(), settings, uniform(range(rows), [0] * rows), mask_of(list(range(rows)), allowed)
    )
    probabilities = torch.softmax(scores.double() / 0.9, -1)
    for row, token in enumerate(drawn.tokens):
        admitted = probabilities[row] * allowed[row]
        order = admitted.argsort(descending=True)[: top_k or int(allowed[row].sum())]
        shares = admitted[order] / admitted[order].sum()
        kept = order[(shares.cumsum(0) - shares) < top_p]
        mass = float(admitted[kept].sum())
        assert token in kept.tolist()
        assert drawn.kept_mass[row] == pytest.approx(mass, rel=1e-4)
        assert drawn.raw_logprobs[row] == pytest.approx(float(probabilities[row][token].log()), abs=1e-4)
        assert drawn.logprobs[row] == pytest.approx(drawn.raw_logprobs[row] - np.log(mass), abs=1e-4)


def test_tokens_that_the_model_would_never_say_are_drawn_all_the_same() -> None:
    scores = torch.zeros(2, 600)
    scores[:, 9] = 5000.0
    scores[:, 301] = 2.0
    allowed = torch.zeros(2, 600, dtype=torch.bool)
    allowed[:, 300:302] = True
    drawn = draw(scores, [Sampling(), Sampling(0)], np.array([0.99, 0.5]), mask_of([0, 1], allowed))
    assert drawn.tokens == [301, 301] and drawn.kept_mass == [0.0, 0.0]
    assert drawn.logprobs == pytest.approx([2 - np.log(1 + np.e**2), 0.0])
    assert drawn.raw_logprobs == pytest.approx([-4998, -4998])


def test_rows_without_a_constraint_are_drawn_as_if_they_were_alone(bench: Any) -> None:
    """Log-probabilities and tokens to the last bit: the way in which a row is drawn is its own."""
    kernels = bench.engine()._kernels
    scores = torch.randn(6, 700, generator=torch.Generator().manual_seed(1)) * 3
    settings = [
        Sampling(),
        Sampling(top_k=9),
        Sampling(0.7, alternatives=3),
        Sampling(0),
        Sampling(),
        Sampling(1.3),
    ]
    where = uniform(range(6), range(6))
    allowed = torch.zeros(2, 700, dtype=torch.bool)
    allowed[:, 40:60] = True
    together = draw_each(kernels, scores.clone(), settings, where, mask_of([1, 4], allowed))
    assert {together.tokens[1], together.tokens[4]} <= set(range(40, 60))
    for row in (0, 2, 3, 5):
        alone = draw_each(kernels, scores[row : row + 1].clone(), settings[row : row + 1], where[row : row + 1])
        assert alone.tokens[0] == together.tokens[row]
        assert (
            alone.logprobs[0] == together.logprobs[row] and alone.raw_logprobs[0] == together.raw_logprobs[row]
        )
    assert set(together.alternatives) == {2} and together.alternatives == likeliest(scores, settings)


def test_alternatives_are_the_likeliest_of_the_model(bench: Any) -> None:
    engine = bench.engine(stop_ids=(END,))
    prompt = bench.prompt(12)
    settings = (
        Sampling(0.7, max_tokens=6, seed=1, alternatives=5),
        Sampling(0.7, top_k=2, max_tokens=6, seed=1, alternatives=300),
        Sampling(0.7, max_tokens=6, seed=1, alternatives=4, constraint=regex("[a-z]{6}")),
        Sampling(0, max_tokens=6, alternatives=1),
    )
    requests = [engine.submit(prompt, sampling) for sampling in settings]
    other = engine.submit(prompt, Sampling(max_tokens=6))
    bench.run(engine, *requests, other)
    assert other.completion().alternatives is None
    for request, sampling in zip(requests, settings, strict=True):
        done = request.completion()
        assert done.alternatives is not None
        width = min(sampling.alternatives, 264)
        assert done.alternatives.tokens.shape == done.alternatives.raw_logprobs.shape == (request.own, width)
        for i in range(request.own):
            before = torch.tensor([request.tokens[: request.prompt_length + i]])
            with torch.no_grad():
                logits = bench.peer()(before).logits[0, -1].double() / (sampling.temperature or 1.0)
            whole = torch.log_softmax(logits, -1).numpy()
            best = np.argsort(-whole)[:width]
            assert np.allclose(done.alternatives.raw_logprobs[i], whole[best], atol=1e-4)
            assert np.allclose(whole[done.alternatives.tokens[i]], whole[best], atol=1e-4)
        if sampling.alternatives == 300 or not sampling.temperature:
            at = [list(row).index(t) for row, t in zip(done.alternatives.tokens, done.tokens, strict=True)]
            assert np.allclose(
                done.alternatives.raw_logprobs[range(request.own), at], done.raw_logprobs, atol=1e-5
            )


def test_greedy_takes_the_best_that_is_admitted(bench: Any) -> None:
    request = sampled(bench, regex("[f-k]{5}"), temperature=0, max_tokens=9)
    assert len(said(request)) == 5 and request.stop == "eos"
    for i in range(5):
        before = request.tokens[: 12 + i]
        scores = {t: bench.reference([*before, t])[-1] for t in b"fghijk"}
        assert request.tokens[12 + i] == max(scores, key=scores.__getitem__)
    assert request.completion().logprobs.tolist() == [0.0] * 6 and bench.agrees(request)


def test_an_end_is_drawn_only_where_the_text_is_whole(bench: Any) -> None:
    """Even if the token that ends is one that the text could go on with."""
    letter = ord("b")
    for seed in range(20):
        engine = bench.engine(stop_ids=(END, letter))
        request = engine.submit(
            bench.prompt(12), Sampling(seed=seed, max_tokens=40, constraint=regex("a{4}[bc]*"))
        )
        bench.run(engine, request)
        whole = bytes(request.tokens[12:-1])
        assert request.stop in ("eos", "length") and (
            request.stop == "length" or request.tokens[-1] in (END, letter)
        )
        assert re.fullmatch(rb"a{4}c*", whole), whole


def test_without_a_token_that_ends_a_text_ends_when_it_cannot_go_on(bench: Any) -> None:
    engine = bench.engine()
    request = engine.submit(bench.prompt(12), Sampling(max_tokens=40, seed=2, constraint=regex("[a-z]{7}")))
    bench.run(engine, request)
    assert request.stop == "stop" and len(said(request)) == request.own == 7


def test_lengths_and_stop_strings_cut_as_ever(bench: Any) -> None:
    short = sampled(bench, regex("[a-z]{30}"), seed=1, max_tokens=11)
    assert short.stop == "length" and re.fullmatch(rb"[a-z]{11}", said(short))
    cut = sampled(bench, regex("[ab]{40}[0-9]+"), seed=1, max_tokens=200, stop=("ba",))
    assert cut.stop == "stop" and said(cut).endswith(b"ba") and said(cut).count(b"ba") == 1


def test_e10_a_request_that_is_sent_back_keeps_its_place(bench: Any) -> None:
    def run(cache_tokens: int) -> tuple[list[list[int]], int]:
        engine = bench.engine(stop_ids=(END,), cache_tokens=cache_tokens)
        sampling = Sampling(0, max_tokens=60, constraint=regex("([a-f][0-9]){25}"))
        requests = [engine.submit(bench.prompt(30, i), sampling) for i in range(4)]
        bench.run(engine, *requests)
        assert all(re.fullmatch(rb"([a-f][0-9]){25}", said(r)) and bench.agrees(r) for r in requests)
        return [r.tokens for r in requests], engine._scheduler.preemptions

    (roomy, none), (tight, some) = run(4096), run(136)
    assert none == 0 < some and roomy == tight


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_new_weights_keep_its_place(bench: Any, in_flight: str) -> None:
    engine = bench.engine(stop_ids=(END,))
    request = engine.submit(
        bench.prompt(12), Sampling(max_tokens=60, seed=4, constraint=regex("([a-f][0-9]){12}"))
    )
    for _ in range(7):
        engine.step()
    bench.swap(engine, 2, in_flight=in_flight)
    bench.run(engine, request)
    assert re.fullmatch(rb"([a-f][0-9]){12}", said(request)) and len(set(request.versions)) == 2


class Prophet:
    """Drafts what a plain run said, with a token at every third place that is not admitted, and an end."""

    def __init__(self, request: Request, whole: list[int]) -> None:
        self._request, self._whole = request, whole

    def draft(self, room: int) -> list[int]:
        start = len(self._request.tokens)
        places = range(start, min(start + max(0, min(room, 5)), len(self._whole)))
        return [0 if i % 7 == 3 else END if i % 7 == 6 else self._whole[i] for i in places]

    def learn(self, drafted: int, accepted: int) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_e7_drafts_change_the_number_of_steps_alone(bench: Any, temperature: float) -> None:
    sampling = Sampling(temperature, max_tokens=400, seed=6, constraint=schema(PERSON), alternatives=2)
    one = sampled(bench, schema(PERSON), temperature=temperature, max_tokens=400, seed=6)
    engine = bench.engine(stop_ids=(END,))
    other = engine.submit(bench.prompt(12), sampling)
    other.drafter = Prophet(other, one.tokens)
    bench.run(engine, other)
    assert other.tokens == one.tokens and other.stop == one.stop == "eos" and bench.agrees(other)
    assert np.allclose(other.completion().logprobs, one.completion().logprobs, atol=1e-4)
    assert np.allclose(other.completion().kept_mass, one.completion().kept_mass, atol=1e-4)
    stats = engine.stats()
    assert (
        0 < stats.accepted_tokens <= stats.drafted_tokens and stats.steps == other.own - stats.accepted_tokens
    )
    assert len(other.alternatives) == other.own
    assert stats.accepted_tokens == stats.drafted_tokens, "what is not admitted is not drafted"


BAD = [
    schema({"type": "objekt"}),
    schema({"type": "array", "uniqueItems": True}),
    schema({"$ref": "#/nowhere"}),
    schema({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    schema({"type": "string", "pattern": "(?=a)b"}),
    schema({"not": {"type": "string"}, "x-guidance": {"lenient": True}}),
    Constraint("schema", "{"),
    Constraint("schema", "[" * 100_000),
    Constraint("schema", "true"),
    Constraint("schema", '"' + "a" * (1 << 20) + '"'),
    regex("(a"),
    regex(r"(a)\1"),
    regex(r"[^\s\S]"),
    Constraint("grammar", "start: nothing"),
    Constraint("grammar", "start: start"),
    Constraint("json", "text"),
    Constraint("yaml", ""),
]


@pytest.mark.parametrize("constraint", BAD, ids=range(len(BAD)))
def test_a_constraint_that_cannot_be_used_fails_alone(bench: Any, constraint: Constraint) -> None:
    engine = bench.engine(stop_ids=(END,))
    other = engine.submit(bench.prompt(12), Sampling(0, max_tokens=5))
    with pytest.raises(BadConstraint) as caught:
        engine.submit(bench.prompt(12), Sampling(constraint=constraint))
    assert caught.value.expected and len(str(caught.value)) < 1000
    bench.run(engine, other)
    assert other.own == 5 and engine.stats().blocks_held == 0


class WithoutB(ByteTokenizer):
    def token_bytes(self, token: int) -> bytes:
        return b"" if token == ord("b") else super().token_bytes(token)


@pytest.mark.parametrize("drafted", [False, True])
def test_a_dead_end_is_the_error_of_one_request(bench: Any, drafted: bool) -> None:
    tokenizer = WithoutB()
    config = NativeConfig(dtype="float32", kernels=bench.engine()._kernels is not None)
    engine = NativeEngine(bench.decoder(), config=config, tokenizer=tokenizer, stop_ids=(END,))
    lost = engine.submit(bench.prompt(12), Sampling(max_tokens=20, constraint=regex("aaab")))
    if drafted:
        lost.drafter = Prophet(lost, [*lost.tokens, *b"aaa"])
    other = engine.submit(bench.prompt(12, 1), Sampling(0, max_tokens=20))
    bench.run(engine, lost, other)
    assert isinstance(lost.error, BadConstraint) and "dead end after 3 tokens" in str(lost.error)
    assert said(lost) == b"aaa" and other.own > 3 and other.stop in ("eos", "length")
    assert engine.stats().blocks_held == 0


def test_constraints_without_a_tokenizer_are_refused() -> None:
    engine = NativeEngine(random_decoder(tiny_config(num_layers=1)), config=NativeConfig(dtype="float32"))
    with pytest.raises(EngineError, match="need a tokenizer"):
        engine.submit([1], Sampling(constraint=Constraint("json")))


def byte_level(folder: Path) -> HfTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [('"', ":"), ("Ġ", '"'), ("{", '"'), ("t", "r"), ("tr", "ue"), ("u", "e"), ('"', "}"), ("Ã", "©")]
    vocab = {c: i for i, c in enumerate([*alphabet, *(a + b for a, b in merges)])}
    fast = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<other>", special=True)])
    fast.add_tokens([AddedToken("<tool_call>", special=False)])
    return saved(fast, folder)


def sentence_pieces(folder: Path) -> HfTokenizer:
    pieces = [
        "▁",
        "▁{",
        "{",
        "}",
        '"',
        '":',
        "▁true",
        "true",
        "a",
        "at",
        "▁at",
        "é",
        "1",
        "42",
        "▁4",
        ",",
        "red",
    ]
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    fast = Tokenizer(models.Unigram([(name, -float(i)) for i, name in enumerate(names)], 0, byte_fallback=True))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    fast.add_special_tokens([AddedToken("<unk>", special=True), AddedToken("<end>", special=True)])
    return saved(fast, folder)


def saved(fast: Tokenizer, folder: Path) -> HfTokenizer:
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    return HfTokenizer(folder)


@pytest.mark.parametrize("build", [byte_level, sentence_pieces])
def test_any_kind_of_tokenizer(tmp_path: Path, build: Any) -> None:
    """Any admitted tokens, one after the other, make an admitted text, and a text is reached in many ways."""
    tokenizer = build(tmp_path)
    grammars = Grammars(tokenizer, tokenizer.vocab_size + 7, {tokenizer.eos_id})
    used: set[int] = set()
    for seed in range(30):
        tokens = walk(grammars, schema(PERSON), tokenizer.eos_id, seed)
        if tokens is not None:
            jsonschema.validate(json.loads(b"".join(map(tokenizer.token_bytes, tokens[:-1]))), PERSON)
            used |= set(tokens)
    assert used and max(used) < tokenizer.vocab_size
    names = {tokenizer.token_bytes(t) for t in used if len(tokenizer.token_bytes(t)) > 1}
    assert names & {b'":', b" {", b'{"', b"true", b" true"}, "tokens of several characters are among them"
    written = tokenizer.encode('{"name": "é", "age": 42, "tags": ["red"], "at": {"x": true}}')
    guide = grammars.guide(schema(PERSON))
    assert guide.admitted(written) == len(written) or build is sentence_pieces
