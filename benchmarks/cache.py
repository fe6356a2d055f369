"""Benchmarks of the cache of keys and values.

``engine.kv_int8.memory``: bytes per token as int8 beside bfloat16; better by the ratio. The mean |Δ log p| of
a text is printed beside it, in float32, so that quantisation is all that differs.

``engine.tier.speedup``: ``BENCH_SESSIONS`` (50) idle sessions of 4,000 tokens whose keys and values went to
disk get a next turn of 16 tokens; the seconds to its first token, beside those that computing the 4,000 tokens
took when the sessions began. The files are written out and dropped from the page cache before, where the
system allows it.

``engine.prefix.hit_rate``, ``engine.prefix.speedup``: an agent's conversation of 10 turns, 16 members at once,
behind 2,000 tokens of system prompt. The share of the prompt tokens found in the cache, beside the share that
was there to be found; and the seconds, beside those of ``BENCH_MEMBERS`` (2) members on an engine whose cache
is emptied before each turn, times 16 / ``BENCH_MEMBERS``.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.row import Row

ROOT = Path(__file__).parent.parent
SESSION_TOKENS, TURN_TOKENS = 4000, 16
SESSIONS = int(os.environ.get("BENCH_SESSIONS", "50"))
SYSTEM_TOKENS, TURNS, MEMBERS, USER_TOKENS, ANSWER_TOKENS = 2000, 10, 16, 40, 16
ALONE = int(os.environ.get("BENCH_MEMBERS", "2"))
SCORED_TOKENS = 1024


def rows() -> Iterator[Row]:
    """Yield the rows, in the order of the module's docstring."""
    from lehr.model.fetch import fetch

    folder = fetch("smollm2-135m")
    text = _text(folder)
    yield _int8(folder, text)
    yield _tiers(folder, text)
    yield from _prefix(folder, text)


def _say(line: str) -> None:
    print(f"    {line}", file=sys.stderr, flush=True)


def _text(folder: Path) -> list[int]:
    """Return the documentation and the sources as tokens."""
    from lehr.model.tokenizer import load_tokenizer

    files = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "src").rglob("*.py"))]
    return load_tokenizer(folder).encode("\n".join(f.read_text() for f in files))


def _engine(folder: Path, **settings: Any) -> Any:
    import torch

    from lehr.engine.native.engine import NativeEngine
    from lehr.engine.native.settings import NativeConfig
    from lehr.model.checkpoint import load_decoder

    config = NativeConfig(dtype="bfloat16", **settings)
    return NativeEngine(load_decoder(folder, torch.bfloat16), config=config)


def _int8(folder: Path, text: list[int]) -> Row:
    import torch

    from lehr.engine.native.rows import token_bytes
    from lehr.model.config import load_config

    exact, rounded = (_log_probabilities(folder, text[:SCORED_TOKENS], t) for t in (torch.float32, torch.int8))
    difference = (exact - rounded).abs()
    mean, most = difference.mean(), difference.max()
    _say(f"|Δ log p| over {len(difference)} tokens of text: mean {mean:.4f}, max {most:.3f}")
    config = load_config(folder)
    mine, theirs = (token_bytes(config, t) for t in (torch.int8, torch.bfloat16))
    _say(f"{mine / theirs:.3f} of bfloat16's bytes, scales included")
    return Row.duration("engine.kv_int8.memory", mine, "bytes/token", "bfloat16", theirs)


def _log_probabilities(folder: Path, tokens: list[int], kept_in: Any) -> Any:
    """Return the log-probability of each token after the first, in chunks and then token by token."""
    import torch

    from lehr.engine.native.attention import Span
    from lehr.engine.native.fused import FusedForward
    from lehr.engine.native.kernels.load import kernels_for
    from lehr.engine.native.rows import Rows
    from lehr.model.checkpoint import load_decoder

    decoder, kernels = load_decoder(folder, torch.float32), kernels_for(torch.float32)
    if kernels is None:
        raise RuntimeError("this benchmark needs a C++ compiler")
    forward, slot = FusedForward(decoder, kernels), Rows(decoder.config, kept_in).take(len(tokens))
    parts: list[Any] = []
    at = 0
    with torch.inference_mode():
        while at < len(tokens) - 1:
            count = min(256 if at < 768 else 8, len(tokens) - 1 - at)
            hidden = forward.hidden(tokens[at : at + count], [Span(slot, at, count, 0)])
            following = torch.tensor(tokens[at + 1 : at + 1 + count])
            parts.append(decoder.logits(hidden).log_softmax(-1).gather(1, following[:, None])[:, 0])
            at += count
    return torch.cat(parts)


def _first_token(engine: Any, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to the first token of a prompt, and how much of it was cached."""
    from lehr.core.trace import Sampling

    start = time.perf_counter()
    request = engine.submit(prompt, Sampling(temperature=0, max_tokens=1))
    while not request.finished:
        engine.step()
    return time.perf_counter() - start, request.cached_tokens


def _tiers(folder: Path, text: list[int]) -> Row:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as place:
        engine = _engine(folder, cache_tokens=SESSION_TOKENS + 256, tier_disk_bytes=64 << 30, tier_folder=place)
        try:
            return _resumed(engine, Path(place), text)
        finally:
            engine.close()


def _resumed(engine: Any, place: Path, text: list[int]) -> Row:
    step = max(1, (len(text) - SESSION_TOKENS) // SESSIONS)
    sessions = [[number, *text[number * step :][: SESSION_TOKENS - 1]] for number in range(SESSIONS)]
    computed = [_first_token(engine, prompt)[0] for prompt in sessions]
    _first_token(engine, text[-SESSION_TOKENS:])  # the last session makes room too
    if not engine._tiers.tiers.drain(120):
        raise RuntimeError("the tiers did not come to rest in 120 s")
    stats = engine.stats().tiers
    dropped = _drop_page_cache(place)
    loaded: list[float] = []
    cached: list[int] = []
    for prompt in sessions:
        seconds, found = _first_token(engine, [*prompt, *text[:TURN_TOKENS]])
        loaded.append(seconds)
        cached.append(found)
    after = engine.stats().tiers
    _say(
        f"{SESSIONS} sessions: {stats.disk_bytes / 1e6:.0f} MB on disk, {stats.memory_bytes / 1e6:.0f} MB in "
        f"compressed memory; page cache {'dropped' if dropped else 'warm'}"
    )
    _say(
        f"{min(cached)} to {max(cached)} of {SESSION_TOKENS} tokens found; {after.disk_hits} blocks from disk; "
        f"loading chosen {after.chosen} times, refused {after.refused}"
    )
    row = Row.duration(
        "engine.tier.speedup", statistics.mean(loaded), "s", "computed again", statistics.mean(computed)
    )
    _say(f"{row.ratio:.1f} times as fast; at least 5 is asked for")
    return row


def _drop_page_cache(place: Path) -> bool:
    """Write files out and drop them from memory; return whether the system was asked to."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in place.rglob("*.kv"):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
    return True


def _prefix(folder: Path, text: list[int]) -> Iterator[Row]:
    engine = _engine(folder, max_running=MEMBERS, cache_tokens=48 * 1024)
    shared = _conversation(engine, text, MEMBERS, TURNS, reuse=True)
    alone = _conversation(_engine(folder, max_running=MEMBERS), text, ALONE, TURNS, reuse=False)
    first = [f"{s:.2f}" for s in shared["first_s"]]
    _say(f"seconds to the first token, median of the members, turn by turn: {' '.join(first)}")
    _say(f"turn 10 takes {shared['first_s'][9] / shared['first_s'][1]:.2f} of turn 2; at most 1.5 is asked for")
    share = 100 * shared["cached"] / shared["prompt"]
    could = 100 * shared["shareable"] / shared["prompt"]
    _say(f"{100 * share / could:.1f} % of what can be shared; at least 95 is asked for")
    yield Row.throughput("engine.prefix.hit_rate", share, "%", "could be shared", could)
    row = Row.duration(
        "engine.prefix.speedup", shared["seconds"], "s", "no reuse", alone["seconds"] * MEMBERS / ALONE
    )
    _say(f"{row.ratio:.1f} times as fast; at least 5 is asked for")
    yield row


def _conversation(engine: Any, text: list[int], members: int, turns: int, *, reuse: bool) -> dict[str, Any]:
    """Let ``members`` talk at once, behind one system prompt."""
    from lehr.core.trace import Sampling

    system = text[:SYSTEM_TOKENS]
    chats = [list(system) for _ in range(members)]
    counts: dict[str, Any] = {"seconds": 0.0, "cached": 0, "prompt": 0, "shareable": 0, "first_s": []}
    for turn in range(turns):
        for number, chat in enumerate(chats):
            at = SYSTEM_TOKENS + (turn * MEMBERS + number) * USER_TOKENS
            counts["shareable"] += len(chat) - (SYSTEM_TOKENS if turn == 0 and number == 0 else 0)
            chat.extend(text[at : at + USER_TOKENS])
            counts["prompt"] += len(chat)
        start = time.perf_counter()
        sampling = Sampling(temperature=0, max_tokens=ANSWER_TOKENS)
        requests = [engine.submit(chat, sampling) for chat in chats]
        waiting, first_s = set(requests), []
        while not all(r.finished for r in requests):
            if not reuse:
                engine._scheduler.pool.flush()
            engine.step()
            began = [r for r in waiting if r.own]
            first_s += [time.perf_counter() - start] * len(began)
            waiting.difference_update(began)
        counts["seconds"] += time.perf_counter() - start
        counts["first_s"].append(statistics.median(first_s))
        counts["cached"] += sum(r.cached_tokens for r in requests)
        chats = [list(r.tokens) for r in requests]
    return counts
