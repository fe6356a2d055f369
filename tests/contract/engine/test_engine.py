"""What every engine keeps, whoever computes; where one differs, it says so by name (docs/engines.md)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lehr.core.batch import Manifest
from lehr.core.errors import DeadlineExceeded
from lehr.core.trace import Completion, Sampling, Version
from lehr.engine.base import Engine, EngineError, RequestTooLarge, UnknownSession, Unsupported
from lehr.engine.local import open_engine
from lehr.engine.messages import Allotment
from lehr.engine.native.settings import NativeConfig
from lehr.engine.remote import RemoteEngine

PROMPT = [*b"What is the capital of France? " * 4]
ENDLESS = Sampling(temperature=0.0, max_tokens=1900)
"""The small model, greedy, never comes to an end of sequence."""
GREEDY = Sampling(temperature=0, max_tokens=8)

pytestmark = pytest.mark.timeout(300)


async def version_of(engine: Engine) -> Version:
    return (await engine.stats()).version


async def bring(engine: Engine, manifest: Manifest, in_flight: Any = "keep") -> None:
    await engine.fetch(manifest)
    await engine.activate(manifest.version, in_flight)


def after(version: Version, count: int = 1) -> Version:
    return Version(version.incarnation, version.n + count)


async def begun(engine: Engine, task: asyncio.Task[Any]) -> None:
    """Return once a request of ``task`` is being decoded."""
    before = (await engine.stats()).steps
    for _ in range(500):
        assert not task.done()
        stats = await engine.stats()
        if stats.running and (stats.steps > before + 3 or stats.steps == 0):
            return
        await asyncio.sleep(0.01)
    raise TimeoutError("no request runs")


async def idle(engine: Engine) -> None:
    """Return once nothing runs and nothing is held."""
    for _ in range(300):
        stats = await engine.stats()
        if stats.running == stats.waiting == stats.blocks_held == 0:
            return
        await asyncio.sleep(0.02)
    raise TimeoutError(f"not idle: {stats}")


def agrees(backend: Any, seed: int, prompt: list[int], done: Completion, temperature: float = 1.0) -> bool:
    said = backend.reference(seed, [*prompt, *done.tokens.tolist()], temperature)[len(prompt) - 1 :]
    return bool(np.abs(said - done.raw_logprobs).max() < 1e-4)


def test_a_completion_is_complete(backend: Any) -> None:
    async def what(engine: Engine) -> None:
        start = await version_of(engine)
        sampling = Sampling(temperature=0.8, max_tokens=12, seed=4)
        done = await asyncio.gather(*(engine.generate(PROMPT, sampling) for _ in range(6)))
        first = done[0]
        assert first.stop in ("length", "eos") and 0 < len(first.tokens) <= 12
        for other in done:
            assert np.array_equal(other.tokens, first.tokens)
            assert len(other.logprobs) == len(other.raw_logprobs) == len(other.kept_mass) == len(other.tokens)
            assert agrees(backend, 1, PROMPT, other, 0.8)
            assert np.allclose(other.logprobs, other.raw_logprobs) and np.allclose(other.kept_mass, 1)
        assert set(first.versions.tolist()) == {start.packed}
        assert any(other.cached_tokens > len(PROMPT) // 2 for other in done[1:]) is backend.caches
        await idle(engine)
        stats = await engine.stats()
        assert stats.blocks_free + stats.blocks_cached + stats.blocks_held == stats.blocks_total
        nothing = await engine.generate(PROMPT, Sampling(max_tokens=0))
        assert nothing.stop == "length" and len(nothing.tokens) == 0

    backend.check(what)


def test_greedy_values_are_those_of_the_distribution_and_of_the_choice(backend: Any) -> None:
    async def what(engine: Engine) -> None:
        sampled = engine.generate(PROMPT, Sampling(temperature=1.3, max_tokens=8, seed=1))
        done, _ = await asyncio.gather(engine.generate(PROMPT, GREEDY), sampled)
        assert agrees(backend, 1, PROMPT, done) and agrees(backend, 1, PROMPT, await sampled_again(engine), 1.3)
        assert np.allclose(done.logprobs, 0, atol=1e-6)
        assert np.allclose(done.kept_mass, np.exp(done.raw_logprobs), atol=1e-4)

    async def sampled_again(engine: Engine) -> Completion:
        return await engine.generate(PROMPT, Sampling(temperature=1.3, max_tokens=8, seed=1))

    backend.check(what)


def test_scores(backend: Any) -> None:
    async def what(engine: Engine) -> None:
        said = await engine.score(PROMPT)
        assert said.shape == (len(PROMPT) - 1,) and said.dtype == np.float32
        assert np.abs(said - backend.reference(1, PROMPT)).max() < 1e-4
        assert len(await engine.score(PROMPT[:1])) == 0
        if backend.temperatures:
            said = await engine.score(PROMPT, temperature=0.7)
            assert np.abs(said - backend.reference(1, PROMPT, 0.7)).max() < 1e-4
        else:
            with pytest.raises(Unsupported, match=r"temperature=0\.7"):
                await engine.score(PROMPT, temperature=0.7)

    backend.check(what)


@pytest.mark.parametrize(("name", "value"), [("top_p", 0.6), ("top_k", 3)])
def test_e6_e19_filters_are_served_with_both_values_or_refused_by_name(
    backend: Any, name: str, value: Any
) -> None:
    async def what(engine: Engine) -> None:
        sampling = Sampling(max_tokens=8, seed=2, **{name: value})
        if not backend.filters:
            with pytest.raises(Unsupported, match=f"{name}={value}"):
                await engine.generate(PROMPT, sampling)
            return
        done = await engine.generate(PROMPT, sampling)
        assert agrees(backend, 1, PROMPT, done)
        assert np.allclose(done.raw_logprobs - done.logprobs, np.log(done.kept_mass), atol=1e-5)
        assert done.kept_mass.max() < 1

    backend.check(what)


def test_e19_stop_strings_are_found_or_refused_by_name(backend: Any) -> None:
    async def what(engine: Engine) -> None:
        if not backend.stops:
            with pytest.raises(Unsupported, match="stop strings"):
                await engine.generate(PROMPT, Sampling(stop=("a",)))
            return
        plain = await engine.generate(PROMPT, Sampling(temperature=0, max_tokens=60))
        at = next(i for i, token in enumerate(plain.tokens.tolist()) if 32 < token < 127)
        stop = chr(plain.tokens[at])
        done = await engine.generate(PROMPT, Sampling(temperature=0, max_tokens=60, stop=(stop,)))
        assert done.stop == "stop" and done.tokens.tolist() == plain.tokens[: at + 1].tolist()

    backend.check(what)


def test_e1_weights_change_while_requests_run(backend: Any) -> None:
    async def what(engine: Engine) -> None:
        start = await version_of(engine)
        running = asyncio.create_task(engine.generate(PROMPT[:40], ENDLESS, session="long"))
        await begun(engine, running)
        before = await engine.generate(PROMPT, GREEDY)
        assert ((await engine.generate(PROMPT, GREEDY)).cached_tokens > len(PROMPT) // 2) is backend.caches
        await bring(engine, backend.publish(2, after(start)))
        done = await engine.generate(PROMPT, GREEDY)
        assert done.cached_tokens == 0
        assert set(done.versions.tolist()) == {after(start).packed}
        assert agrees(backend, 2, PROMPT, done) and not agrees(backend, 1, PROMPT, done)
        assert await version_of(engine) == after(start)
        assert np.abs(await engine.score(PROMPT) - backend.reference(2, PROMPT)).max() < 1e-4
        assert await engine.abort("long") == 1
        kept = await running
        assert list(kept.versions) == sorted(kept.versions)
        assert set(kept.versions.tolist()) == {start.packed, after(start).packed}
        assert kept.kv_policy == "kept_across_versions" and done.kv_policy == "exact"
        with pytest.raises(EngineError):
            await engine.activate(start)
        await bring(engine, backend.publish(1, after(start, 2)))
        back = await engine.generate(PROMPT, GREEDY)
        assert back.cached_tokens == 0 and np.allclose(back.raw_logprobs, before.raw_logprobs, atol=1e-4)

    backend.check(what)


def test_e4_running_requests_are_computed_again_or_ended_if_so_wanted(backend: Any) -> None:
    async def what(engine: Engine) -> None:
        start = await version_of(engine)
        running = asyncio.create_task(engine.generate(PROMPT, ENDLESS, session="long"))
        await begun(engine, running)
        await bring(engine, backend.publish(2, after(start)), "recompute")
        await asyncio.sleep(0.2)
        await engine.abort("long")
        done = await running
        fresh = done.versions == after(start).packed
        assert fresh.any() and not fresh.all() and done.kv_policy == "exact"
        said = backend.reference(2, [*PROMPT, *done.tokens.tolist()])[len(PROMPT) - 1 :]
        assert np.abs(said - done.raw_logprobs)[fresh].max() < 1e-4
        ending = asyncio.create_task(engine.generate(PROMPT, ENDLESS))
        await begun(engine, ending)
        await bring(engine, backend.publish(1, after(start, 2)), "abort")
        ended = await asyncio.wait_for(ending, 20)
        assert ended.stop == "abort" and set(ended.versions.tolist()) == {after(start).packed}
        assert agrees(backend, 1, PROMPT, await engine.generate(PROMPT, GREEDY))

    backend.check(what)


def test_damaged_weights_are_refused(backend: Any) -> None:
    async def what(engine: Engine) -> None:
        start = await version_of(engine)
        good = backend.publish(3, after(start))
        with pytest.raises(EngineError, match="digest"):
            await engine.fetch(Manifest(good.version, good.path, "0" * 32, good.nbytes))
        with pytest.raises(EngineError, match="are not at"):
            await engine.fetch(Manifest(good.version, good.path + ".gone", good.digest, good.nbytes))
        with pytest.raises(EngineError, match="were not fetched"):
            await engine.activate(good.version)
        assert len((await engine.generate(PROMPT, Sampling(max_tokens=2))).tokens) > 0

    backend.check(what)


def test_e11_too_large_fails_alone_and_cancelling_frees(backend: Any) -> None:
    async def what(engine: Engine) -> None:
        with pytest.raises(RequestTooLarge, match="at most 2048 together"):
            await engine.generate([1] * 2030, Sampling(max_tokens=19))
        for tokens in ([], [264], [-1]):
            with pytest.raises(EngineError):
                await engine.generate(tokens, GREEDY)
        with pytest.raises(DeadlineExceeded):
            await engine.generate(PROMPT, ENDLESS, timeout_s=0.05)
        task = asyncio.create_task(engine.generate(PROMPT, ENDLESS))
        await begun(engine, task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(engine)
        assert len((await engine.generate(PROMPT, Sampling(max_tokens=3))).tokens) > 0

    backend.check(what)


def test_nothing_is_sampled_during_a_pause(backend: Any) -> None:
    async def what(engine: Engine) -> None:
        start = await version_of(engine)
        running = asyncio.create_task(engine.generate(PROMPT, ENDLESS, session="long"))
        await begun(engine, running)
        await engine.pause()
        await engine.pause()
        steps = (await engine.stats()).steps
        waiting = asyncio.create_task(engine.generate(PROMPT, GREEDY))
        with pytest.raises(DeadlineExceeded):
            await engine.generate(PROMPT, GREEDY, timeout_s=0.3)
        await bring(engine, backend.publish(2, after(start)))
        await asyncio.sleep(0.3)
        assert (await engine.stats()).steps == steps
        assert not waiting.done() and not running.done()
        assert await engine.abort("long") == 1
        done = await asyncio.wait_for(running, 20)
        assert done.stop == "abort" and set(done.versions.tolist()) == {start.packed}
        await engine.resume()
        await engine.resume()
        assert set((await asyncio.wait_for(waiting, 60)).versions.tolist()) == {after(start).packed}

    backend.check(what)


def test_e3_a_flush_never_reports_a_success_that_did_not_happen(backend: Any) -> None:
    async def what(engine: Engine) -> None:
        await engine.generate(PROMPT, GREEDY)
        assert ((await engine.generate(PROMPT, GREEDY)).cached_tokens > len(PROMPT) // 2) is backend.caches
        await engine.flush()
        assert (await engine.generate(PROMPT, GREEDY)).cached_tokens == 0
        running = asyncio.create_task(engine.generate(PROMPT, ENDLESS, session="long"))
        await begun(engine, running)
        if backend.flushes_busy:
            await engine.flush()
            assert (await engine.generate([*PROMPT], GREEDY)).cached_tokens == 0
            assert not running.done()
        else:
            with pytest.raises(EngineError, match="cache"):
                await engine.flush()
        await engine.abort("long")
        await running
        await engine.flush()
        assert (await engine.generate(PROMPT, GREEDY)).cached_tokens == 0

    backend.check(what)


def test_e12_abort_returns_what_there_is_and_names_an_unknown_session(backend: Any) -> None:
    async def what(engine: Engine) -> None:
        tasks = [
            asyncio.create_task(engine.generate(PROMPT, ENDLESS, session=name)) for name in ("a", "a", "b")
        ]
        await begun(engine, tasks[0])
        with pytest.raises(UnknownSession, match="'other'"):
            await engine.abort("other")
        assert await engine.abort("a") == 2
        assert not tasks[2].done()
        assert await engine.abort() == 1
        for task in tasks:
            done = await task
            assert done.stop == "abort" and len(done.tokens) > 0 and agrees(backend, 1, PROMPT, done)
        with pytest.raises(UnknownSession):
            await engine.abort("a")
        assert await engine.abort() == 0

    backend.check(what)


def test_closing_ends_what_runs(backend: Any) -> None:
    async def what(engine: Engine) -> None:
        running = asyncio.create_task(engine.generate(PROMPT, ENDLESS))
        await begun(engine, running)
        await engine.close()
        await engine.close()
        assert (await asyncio.wait_for(running, 20)).stop == "abort"

    backend.check(what)


def test_allot_over_the_wire(backend: Any) -> None:
    async def what(engine: Engine) -> None:
        assert isinstance(engine, RemoteEngine)
        await engine.allot(Allotment(1, (0,)))
        assert len((await engine.generate(PROMPT, GREEDY)).tokens) == 8

    if backend.kind == "remote":
        backend.check(what)


def test_tokens_are_told_as_they_are_sampled(folder: Path) -> None:
    async def go() -> None:
        engine = open_engine(folder, NativeConfig(max_running=4, cache_tokens=2048, dtype="float32"))
        told: list[list[int]] = []
        logprobs: list[float] = []
        raw: list[float] = []

        def on_tokens(tokens: Sequence[int], values: Sequence[float], raw_values: Sequence[float]) -> None:
            told.append(list(tokens))
            logprobs.extend(values)
            raw.extend(raw_values)

        try:
            done = await engine.stream(PROMPT, Sampling(temperature=0, max_tokens=9), on_tokens)
            assert [t for tokens in told for t in tokens] == done.tokens.tolist()
            assert np.allclose(logprobs, done.logprobs) and len(told) > 1
            assert np.allclose(raw, done.raw_logprobs) and max(raw) < 0
            told.clear()
            running = asyncio.create_task(engine.stream(PROMPT, ENDLESS, on_tokens, session="long"))
            while len(told) < 3:
                await asyncio.sleep(0.01)
            await engine.abort("long")
            ended = await running
            assert ended.stop == "abort" and [t for tokens in told for t in tokens] == ended.tokens.tolist()
        finally:
            await engine.close()

    asyncio.run(asyncio.wait_for(go(), 120))
