"""The fast variant of the engine beside the standard one: the same weights, prompts and machine, in turns.

``engine.fast.speedup``: tokens per second of one request at a time, greedy, on prompts that ask for code and
JSON; prompts included in the time. What each of rounded weights and drafts adds is printed beside it, and how
far the variants agree.
``engine.ttft_p50_ms``, ``engine.tpot_p50_ms``: time to the first token, and per token after it, of chat
requests that arrive at random (Poisson) at a rate that keeps the standard variant 30, 60 and 90 % busy; the row
is the middle one, fast beside standard. p50 and p99 at all three loads are printed.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.prompts import chat_prompts
from benchmarks.row import Row

from lehr.core.task import Message
from lehr.core.trace import Sampling
from lehr.engine.local import LocalEngine, open_engine
from lehr.engine.native.settings import NativeConfig, fast
from lehr.model.chat import ChatRenderer
from lehr.model.fetch import fetch
from lehr.model.tokenizer import load_tokenizer

STRUCTURED = (
    "Write a Python class Stack with push, pop, peek, is_empty and size. Answer with code only.",
    "Write a JSON array of five people, each with name, age, city and email. Answer with JSON only.",
    "Write Python functions add, subtract, multiply and divide of two numbers, with tests. Code only.",
    'Return this as JSON with the keys name, quantity and price for each: "3 pens at 1.20, 2 books at 8.50, '
    '10 sheets at 0.05, 1 lamp at 23.00". Answer with JSON only.',
)
NEW_TOKENS, ROUNDS = 160, 3
LOADS = (0.3, 0.6, 0.9)
REQUESTS, CHAT_TOKENS = 48, 48
VARIANTS: dict[str, NativeConfig] = {
    "standard": NativeConfig(),
    "rounded": NativeConfig(weights="int8"),
    "drafted": NativeConfig(draft_tokens=8),
    "fast": fast(NativeConfig()),
}


def rows() -> Iterator[Row]:
    """Yield the rows, in the order of the module's docstring."""
    folder = fetch("smollm2-135m")
    yield _speedup(folder)
    yield from asyncio.run(_latency(folder))


def _speedup(folder: Path) -> Row:
    from lehr.app.serve.agreement import measure

    prompts = _encoded(folder, STRUCTURED)
    rates: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(ROUNDS):
        for name, config in VARIANTS.items():
            rates[name].append(asyncio.run(_single_stream(folder, config, prompts)))
    middle = {name: statistics.median(found) for name, found in rates.items()}
    for name in VARIANTS:
        _say(f"{name}: {middle[name]:.1f} tokens/s, {middle[name] / middle['standard']:.2f} times standard")
    _say(str(measure(folder, VARIANTS["fast"])))
    return Row.throughput("engine.fast.speedup", middle["fast"], "tokens/s", "standard", middle["standard"])


async def _single_stream(folder: Path, config: NativeConfig, prompts: list[list[int]]) -> float:
    engine = open_engine(folder, config)
    try:
        await engine.generate(list(range(300, 340)), Sampling(max_tokens=4))
        start, sampled = time.perf_counter(), 0
        for prompt in prompts:
            done = await engine.generate(prompt, Sampling(max_tokens=NEW_TOKENS, temperature=0.0))
            sampled += len(done.tokens)
        spent = time.perf_counter() - start
        stats = await engine.stats()
        if stats.drafted_tokens:
            _say(f"{stats.accepted_tokens} of {stats.drafted_tokens} drafted tokens accepted")
        return sampled / spent
    finally:
        await engine.close()


@dataclass(slots=True)
class _Times:
    """Milliseconds to the first token, and per token after it, of each request."""

    first: list[float] = field(default_factory=list[float])
    each: list[float] = field(default_factory=list[float])

    def __str__(self) -> str:
        return (
            f"first token p50 {_share(self.first, 0.5):.0f} ms, p99 {_share(self.first, 0.99):.0f} ms; "
            f"each after it p50 {_share(self.each, 0.5):.1f} ms, p99 {_share(self.each, 0.99):.1f} ms"
        )


async def _latency(folder: Path) -> list[Row]:
    prompts = _encoded(folder, chat_prompts(REQUESTS))
    capacity = await _capacity(folder, prompts)
    _say(f"the standard variant serves {capacity:.1f} such requests a second")
    found: dict[str, dict[float, _Times]] = {}
    for name in ("standard", "fast"):
        engine = open_engine(folder, VARIANTS[name])
        try:
            found[name] = {}
            for load in LOADS:
                found[name][load] = await _at(engine, prompts, load * capacity, seed=round(100 * load))
                _say(f"{name} at {load:.0%}: {found[name][load]}")
        finally:
            await engine.close()
    ours, theirs = found["fast"][LOADS[1]], found["standard"][LOADS[1]]
    return [
        Row.duration(
            "engine.ttft_p50_ms", _share(ours.first, 0.5), "ms", "standard", _share(theirs.first, 0.5)
        ),
        Row.duration("engine.tpot_p50_ms", _share(ours.each, 0.5), "ms", "standard", _share(theirs.each, 0.5)),
    ]


async def _capacity(folder: Path, prompts: list[list[int]]) -> float:
    """Return how many requests a second the standard variant serves when all of them are there at once."""
    engine = open_engine(folder, VARIANTS["standard"])
    try:
        start = time.perf_counter()
        await asyncio.gather(*(engine.generate(p, Sampling(max_tokens=CHAT_TOKENS)) for p in prompts))
        return len(prompts) / (time.perf_counter() - start)
    finally:
        await engine.close()


async def _at(engine: LocalEngine, prompts: list[list[int]], rate: float, seed: int) -> _Times:
    """Send the prompts as a Poisson process of ``rate`` a second."""
    draw, times = random.Random(seed), _Times()

    async def one(prompt: list[int]) -> None:
        start, ends = time.perf_counter(), list[float]()
        sampling = Sampling(max_tokens=CHAT_TOKENS, seed=draw.getrandbits(32))
        await engine.stream(
            [seed + 300, *prompt], sampling, lambda tokens, *_: ends.extend([time.perf_counter()] * len(tokens))
        )
        times.first.append(1e3 * (ends[0] - start))
        if len(ends) > 1:
            times.each.append(1e3 * (ends[-1] - ends[0]) / (len(ends) - 1))

    async with asyncio.TaskGroup() as tasks:
        for prompt in prompts:
            tasks.create_task(one(prompt))
            await asyncio.sleep(draw.expovariate(rate))
    return times


def _share(values: list[float], share: float) -> float:
    """Return the smallest value that ``share`` of the values do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def _encoded(folder: Path, texts: list[str] | tuple[str, ...]) -> list[list[int]]:
    renderer = ChatRenderer(load_tokenizer(folder))
    return [renderer.start((Message(role="user", content=text),)) for text in texts]


def _say(text: str) -> None:
    print(f"    {text}", file=sys.stderr, flush=True)
