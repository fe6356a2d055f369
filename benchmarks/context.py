"""Benchmarks of long contexts: time, memory, and what sparse attention costs and keeps.

``engine.context.million``: seconds until the first token of a context of 1,048,576 random tokens, with sparse
attention, on a tiny bfloat16 model; ``.memory``: the process' peak. Peers: the limits of half an hour and 16
GB. Seconds and memory of each 100,000 tokens, attention and the choosing of blocks apart, go to
``benchmarks/context.svg`` and ``context.json``.

``engine.sparse.growth``: attention of one decoded token, the choosing of blocks included, at a million tokens
over that at 100,000; medians of steps of two engines in turns. Peer: the limit of 1.5.
``engine.sparse.decode``: that attention at a million tokens, beside exact attention over the same keys.

``engine.context.8k``: seconds to read 8,192 tokens of real text (this project's pages and code) with
SmolLM2-135M; peer: one forward of the ``transformers`` that is installed here, in the same dtype.
``engine.context.32k``: the same for 32,768 tokens under ``yarn`` scaling by 4, with sparse attention; peer:
exact attention. ``engine.context.perplexity``: of the last 8,192 of those 32,768 tokens under ``yarn``; peer:
the model as it is, beyond its trained length.

``engine.sparse.needle``: share of keys in 8,192 tokens whose value is recalled with sparse attention by a model
trained for recall (``benchmarks/needle.py``); peer: with full attention.

``CONTEXT_TOKENS`` shortens the first; ``CONTEXT_PARTS`` (of ``million,smollm,needle``) picks parts.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.row import Row

HERE = Path(__file__).parent
MILLION, STRIDE = 1 << 20, 100_000
LIMIT_S, LIMIT_GB, LIMIT_GROWTH = 1800.0, 16.0, 1.5
PEEKS, ROUNDS, EXACT_ROUNDS = 160, 48, 8
TRAINED, FACTOR = 8192, 4
NEEDLE_TOKENS, NEEDLE_CONTEXTS, TRAINING_S = 8192, 6, 240.0
PART_S = 3600.0


def rows() -> Iterator[Row]:
    """Yield the rows, in the order of the module's docstring."""
    parts = os.environ.get("CONTEXT_PARTS", "million,smollm,needle").split(",")
    if "million" in parts:
        yield from _million_rows(_child("million", int(os.environ.get("CONTEXT_TOKENS", MILLION))))
    if "smollm" in parts:
        yield from _smollm_rows()
    if "needle" in parts:
        found = _child("needle")
        yield Row.throughput("engine.sparse.needle", found["sparse"], "", "full attention", found["full"])


def _child(part: str, *arguments: int | str) -> dict[str, Any]:
    """Run a part in a process of its own and return its last line; what it says before goes to the terminal."""
    command = [sys.executable, "-m", "benchmarks.context", part, *map(str, arguments)]
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, check=True, cwd=HERE.parent, timeout=PART_S
    )
    *said, last = ran.stdout.splitlines()
    print(*(f"    {line}" for line in said), sep="\n", file=sys.stderr, flush=True)
    return json.loads(last)


def _million_rows(found: dict[str, Any]) -> Iterator[Row]:
    from benchmarks.chart import Line, save

    (HERE / "context.json").write_text(json.dumps(found, indent=2) + "\n")
    marks = found["marks"]
    at = [mark["tokens"] / 1000 for mark in marks]
    read = [
        mark["tokens"] - before for mark, before in zip(marks, (0, *(m["tokens"] for m in marks)), strict=False)
    ]
    seconds = [
        Line(label, [mark[key] * STRIDE / some for mark, some in zip(marks, read, strict=True)])
        for label, key in (
            ("all", "seconds"),
            ("attention and choosing", "attention_s"),
            ("choosing", "choosing_s"),
        )
    ]
    save(
        HERE / "context.svg", "thousand tokens", at,
        {"seconds for 100,000 tokens": seconds, "peak memory, GB": [Line("", [m["gb"] for m in marks])]},
    )  # fmt: skip
    yield Row.duration("engine.context.million", found["seconds"], "s", "limit", LIMIT_S)
    yield Row.duration("engine.context.memory", found["gb"], "GB", "limit", LIMIT_GB)
    sparse, exact = found["sparse_ms"], found["exact_ms"]
    yield Row.duration("engine.sparse.growth", sparse["long"] / sparse["short"], "x", "limit", LIMIT_GROWTH)
    yield Row.duration("engine.sparse.decode", sparse["long"], "ms", "exact attention", exact["long"])


def _smollm_rows() -> Iterator[Row]:
    ours, peer = _child("read", TRAINED, "native", "exact"), _child("transformers", TRAINED)
    yield Row.duration("engine.context.8k", ours["seconds"], "s", peer["name"], peer["seconds"])
    longest = FACTOR * TRAINED
    sparse, exact = _child("read", longest, "yarn", "sparse"), _child("read", longest, "yarn", "exact")
    yield Row.duration("engine.context.32k", sparse["seconds"], "s", "exact attention", exact["seconds"])
    scaled, plain = _child("score", longest, "yarn"), _child("score", longest, "none")
    _child("score", TRAINED, "native")
    yield Row.duration("engine.context.perplexity", scaled["last"], "", "not scaled", plain["last"])


def gigabytes() -> float:
    """Return the peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def million(tokens: int) -> dict[str, Any]:
    """Read ``tokens`` tokens and decode after them, beside an engine that holds a tenth of them."""
    import torch

    from lehr.core.trace import Sampling
    from lehr.engine.native.engine import NativeEngine
    from lehr.engine.native.fused import FusedForward
    from lehr.engine.native.settings import NativeConfig, SparseConfig
    from lehr.model.tiny import random_decoder, tiny_config

    short = min(STRIDE, tokens // 2)
    draw = random.Random(0)
    prompt = [draw.randrange(256) for _ in range(tokens - PEEKS)]
    begun = time.perf_counter()
    engines: dict[str, NativeEngine] = {}
    requests: dict[str, Any] = {}
    for name, length in (("short", short), ("long", len(prompt))):
        room = length + PEEKS + 8
        config = NativeConfig(max_running=1, token_budget=8192, cache_tokens=room, sparse=SparseConfig())
        decoder = random_decoder(tiny_config(max_positions=tokens), std=0.1, dtype=torch.bfloat16)
        engine = engines[name] = NativeEngine(decoder, config=config)
        if engine._fused is None:
            raise SystemExit("error: this benchmark needs the kernels, and so a C++ compiler")
        requests[name] = engine.submit(prompt[:length], Sampling(max_tokens=PEEKS, seed=1))
    marks: list[dict[str, float]] = []
    for name in ("short", "long"):
        engine, request = engines[name], requests[name]
        fused = engine._fused
        mark = since = time.perf_counter()
        spent, chosen = fused.attention_s, fused.choosing_s
        while request.own == 0:
            engine.step()
            done = request.computed
            if name == "long" and (request.own or done // STRIDE > len(marks)):
                now = time.perf_counter()
                marks.append({
                    "tokens": done, "seconds": now - mark, "attention_s": fused.attention_s - spent,
                    "choosing_s": fused.choosing_s - chosen, "gb": gigabytes(),
                })  # fmt: skip
                print({k: round(v, 2) for k, v in marks[-1].items()}, flush=True)
                mark, spent, chosen = now, fused.attention_s, fused.choosing_s
        seconds = time.perf_counter() - since
    found: dict[str, Any] = {"tokens": tokens, "seconds": seconds, "marks": marks}
    for kind, rounds in (("sparse", ROUNDS), ("exact", EXACT_ROUNDS)):
        if kind == "exact":
            for engine in engines.values():
                engine._fused = FusedForward(engine._decoder, engine._fused._kernels)
        attention: dict[str, list[float]] = {"short": [], "long": []}
        whole: dict[str, list[float]] = {"short": [], "long": []}
        for _ in range(rounds):
            for name, engine in engines.items():
                spent, mark = engine._fused.attention_s, time.perf_counter()
                engine.step()
                whole[name].append(1e3 * (time.perf_counter() - mark))
                attention[name].append(1e3 * (engine._fused.attention_s - spent))
        found[f"{kind}_ms"] = {name: statistics.median(values) for name, values in attention.items()}
        found[f"{kind}_step_ms"] = {name: statistics.median(values) for name, values in whole.items()}
    found |= {"gb": gigabytes(), "whole_s": time.perf_counter() - begun}
    print({k: v for k, v in found.items() if k != "marks"}, flush=True)
    return found


def text_tokens(count: int) -> list[int]:
    """Return the first ``count`` tokens of this project's pages, then of its code."""
    from lehr.model.fetch import fetch
    from lehr.model.tokenizer import load_tokenizer

    tokenizer, tokens = load_tokenizer(fetch("smollm2-135m")), list[int]()
    root = HERE.parent
    for file in (*sorted(root.glob("docs/*.md")), *sorted(root.glob("src/lehr/**/*.py"))):
        tokens += tokenizer.encode(file.read_text())
        if len(tokens) >= count:
            return tokens[:count]
    raise SystemExit(f"error: this project has {len(tokens)} tokens of text, and {count} are needed")


def _smollm(length: int, scaling: str, attention: str = "exact") -> Any:
    from lehr.engine.native.engine import NativeEngine
    from lehr.engine.native.settings import NativeConfig, SparseConfig
    from lehr.model.checkpoint import load_decoder
    from lehr.model.dtype import compute_dtype
    from lehr.model.fetch import fetch
    from lehr.model.scaling import RopeScaling

    scalings = {
        "native": None,
        "yarn": RopeScaling(factor=FACTOR),
        "none": RopeScaling(type="default", original_max_position_embeddings=length),
    }
    decoder = load_decoder(fetch("smollm2-135m"), compute_dtype(), scalings[scaling])
    sparse = SparseConfig() if attention == "sparse" else None
    return NativeEngine(
        decoder,
        config=NativeConfig(max_running=1, token_budget=2048, cache_tokens=length + 64, sparse=sparse),
    )


def read(length: int, scaling: str, attention: str) -> dict[str, Any]:
    """Time SmolLM2 on ``length`` tokens of text until the first new one, and on some more."""
    from lehr.core.trace import Sampling

    engine, new = _smollm(length, scaling, attention), 16
    request = engine.submit(text_tokens(length - new), Sampling(max_tokens=new, temperature=0))
    begun = time.perf_counter()
    while request.own == 0:
        engine.step()
    seconds, attention_s = time.perf_counter() - begun, engine._fused.attention_s
    begun = time.perf_counter()
    while not engine.idle:
        engine.step()
    found = {"seconds": seconds, "attention_s": attention_s, "gb": gigabytes()}
    found["decode_ms"] = 1e3 * (time.perf_counter() - begun) / (new - 1)
    print(length, scaling, attention, {k: round(v, 2) for k, v in found.items()}, flush=True)
    return found


def score(length: int, scaling: str) -> dict[str, Any]:
    """Return the perplexity of ``length`` tokens of text, and that of the last part."""
    import numpy as np

    begun = time.perf_counter()
    logprobs = _smollm(length, scaling).score(text_tokens(length))
    found = {"all": float(np.exp(-logprobs.mean())), "last": float(np.exp(-logprobs[-TRAINED:].mean()))}
    found |= {"seconds": time.perf_counter() - begun, "gb": gigabytes()}
    print("perplexity", length, scaling, {k: round(v, 2) for k, v in found.items()}, flush=True)
    return found


def transformers(length: int) -> dict[str, Any]:
    """Time one forward of transformers over the same text."""
    import torch
    import transformers as peer

    from lehr.model.dtype import compute_dtype
    from lehr.model.fetch import fetch

    model = peer.AutoModelForCausalLM.from_pretrained(fetch("smollm2-135m"), dtype=compute_dtype())
    tokens = torch.tensor([text_tokens(length)])
    with torch.inference_mode():
        model(tokens[:, :256], logits_to_keep=1)
        begun = time.perf_counter()
        model(tokens, logits_to_keep=1)
    found = {"seconds": time.perf_counter() - begun, "gb": gigabytes()}
    return found | {"name": f"transformers {peer.__version__}"}


def needle() -> dict[str, Any]:
    """Train the model of ``benchmarks.needle`` and return how often it recalls, sparse and full."""
    import copy

    import torch
    from benchmarks.needle import PAIRS, sample, train

    from lehr.core.trace import Sampling
    from lehr.engine.native.engine import NativeEngine
    from lehr.engine.native.settings import NativeConfig, SparseConfig

    torch.set_num_threads(1)
    begun = time.perf_counter()
    decoder, right = train(TRAINING_S)
    print(f"trained for {time.perf_counter() - begun:.0f} s, {right:.3f} right on short contexts", flush=True)
    draw = random.Random(7)
    prompts: list[tuple[list[int], int]] = []
    for _ in range(NEEDLE_CONTEXTS):
        tokens, asked = sample(draw, NEEDLE_TOKENS, PAIRS)
        prompts += [([*tokens[: asked[0]], tokens[at]], tokens[at + 1]) for at in asked]
    found: dict[str, Any] = {"trained": right}
    sparse = SparseConfig(sinks=64, window=128, top_blocks=16, block=64)
    fewer = sparse.model_copy(update={"block": 16})
    for name, choice in (("full", None), ("sparse", sparse), ("a quarter of it", fewer)):
        config = NativeConfig(max_running=1, token_budget=2048, cache_tokens=1 << 16, sparse=choice)
        engine = NativeEngine(copy.deepcopy(decoder), config=config)
        requests = [engine.submit(prompt, Sampling(temperature=0, max_tokens=1)) for prompt, _ in prompts]
        while not engine.idle:
            engine.step()
        answers = [request.tokens[-1] == answer for request, (_, answer) in zip(requests, prompts, strict=True)]
        found[name] = sum(answers) / len(answers)
    seen = (sparse.sink_blocks + sparse.top_blocks) * sparse.block + sparse.window
    print(f"{found}; sparse sees about {seen} of {NEEDLE_TOKENS} tokens", flush=True)
    return found


def main(part: str, *arguments: str) -> None:
    """Run a part and print what it found."""
    values = [int(value) if value.isdigit() else value for value in arguments]
    parts = {f.__name__: f for f in (million, read, score, transformers, needle)}
    print(json.dumps(parts[part](*values)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
