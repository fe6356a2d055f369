"""Where requests go when there are several engines, and what happens when one of them breaks or is updated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.core.batch import Manifest
from lehr.core.errors import ConfigError, DeadlineExceeded, RoleLost
from lehr.core.trace import Completion, Sampling, Version
from lehr.engine.affinity import CHUNK, Prefixes, beginnings
from lehr.engine.base import EngineBroken, EngineError, EngineStats, RequestTooLarge, UnknownSession
from lehr.engine.local import open_engine
from lehr.engine.messages import Allotment
from lehr.engine.native.settings import NativeConfig
from lehr.engine.router import Router
from lehr.engine.seats import SLACK, WORTH
from lehr.model.checkpoint import save_model
from lehr.model.tiny import random_decoder
from lehr.model.tokenizer import ByteTokenizer

V0, V1, V2 = Version(1, 0), Version(1, 1), Version(1, 2)


class Recording:
    """An engine that answers when it is told to, and writes down what it was asked. ``fails``: what every call
    raises; requests that run then fail as well.
    """

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.done = 0
        self.go = asyncio.Event()
        self.go.set()
        self.may_switch = asyncio.Event()
        self.may_switch.set()
        self.refuses: Exception | None = None
        self.version = V0
        self.fetched: set[Version] = {V0}
        self.share: Allotment | None = None
        self.paused = self.mute = self.closed = False
        self.fails: Exception | None = None
        self._broke = asyncio.Event()
        self._running: dict[asyncio.Future[Any], str] = {}

    def break_(self, error: Exception) -> None:
        self.fails = error
        self._broke.set()

    def restart(self, version: Version = V0) -> None:
        self.fails, self.version, self.fetched = None, version, {version}
        self.share, self.paused, self._broke = None, False, asyncio.Event()

    async def _alive(self) -> None:
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails

    async def generate(
        self, tokens: list[int], sampling: Sampling, *, session: str = "", timeout_s: float = 600.0
    ) -> Completion:
        self.asked.append(tuple(tokens))
        await self._alive()
        if self.refuses is not None:
            raise self.refuses
        versions = [self.version.packed]
        waits = {asyncio.ensure_future(self.go.wait()), asyncio.ensure_future(self._broke.wait())}
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError as error:
            raise DeadlineExceeded("too late") from error
        finally:
            for wait in waits:
                wait.cancel()
        if self.fails is not None:
            raise self.fails
        versions.append(self.version.packed)
        self.done += 1
        zeros = np.zeros(2, np.float32)
        return Completion(np.zeros(2, np.int32), zeros, zeros, zeros, np.array(versions, np.int64), "length", 0)

    async def score(self, tokens: list[int], *, temperature: float = 1.0) -> Any:
        await self._alive()
        return np.full(len(tokens) - 1, temperature, np.float32)

    async def fetch(self, manifest: Manifest) -> None:
        await self._alive()
        self.fetched.add(manifest.version)

    async def activate(self, version: Version, in_flight: str = "keep") -> None:
        await self._alive()
        await self.may_switch.wait()
        if self.refuses is not None:
            raise self.refuses
        if version < self.version or version not in self.fetched:
            raise EngineError(f"weights {version} were not fetched")
        self.version = version

    async def pause(self) -> None:
        await self._alive()
        self.paused = True

    async def resume(self) -> None:
        await self._alive()
        self.paused = False

    async def flush(self) -> None:
        await self._alive()

    async def abort(self, session: str = "") -> int:
        await self._alive()
        raise UnknownSession(session)

    async def allot(self, allotment: Allotment) -> None:
        await self._alive()
        self.share = allotment

    async def stats(self) -> EngineStats:
        await self._alive()
        if self.mute:
            await asyncio.sleep(3600)
        return EngineStats(self.version, 1, 0, 1, 0, 0, 1, 2, 0, 3, 1.0, 4)

    async def close(self) -> None:
        self.closed = True


Act = Callable[[Router, list[Recording]], Coroutine[Any, Any, None]]


def with_router(act: Act, count: int = 2, **options: Any) -> None:
    """Run ``act``, and look that the router leaves no task behind."""

    async def go() -> None:
        members = [Recording() for _ in range(count)]
        router = Router(members, **{"patience_s": 0.05, "first_probe_s": 0.005} | options)  # type: ignore[arg-type]
        try:
            await act(router, members)
        finally:
            await router.close()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}, "something is left"
        assert all(member.closed for member in members)

    async def in_time() -> None:
        async with asyncio.timeout(20):
            await go()

    asyncio.run(in_time())


def manifest(version: Version) -> Manifest:
    return Manifest(version, "/weights", "0", 1)


async def until(true: Callable[[], bool]) -> None:
    for _ in range(2000):
        if true():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never became true")


# where requests go


def test_a_group_and_the_turns_of_a_session_share_an_engine():
    async def act(router: Router, members: list[Recording]) -> None:
        for member in members:
            member.go.clear()
        first = [
            asyncio.create_task(router.generate([prompt], Sampling(), session=f"{prompt}/{n}"))
            for prompt in range(4)
            for n in range(3)
        ]
        await asyncio.sleep(0.01)
        for member in members:
            member.go.set()
        await asyncio.gather(*first)
        for prompt in range(4):
            await router.generate([prompt, 7], Sampling(), session=f"{prompt}/1")
        assert all(member.asked for member in members), "one engine got everything"
        seen = [{tokens[0] for tokens in member.asked} for member in members]
        assert not seen[0] & seen[1] and seen[0] | seen[1] == {0, 1, 2, 3}

    with_router(act)


def test_different_prompts_spread_evenly():
    async def act(router: Router, members: list[Recording]) -> None:
        for member in members:
            member.go.clear()
        tasks = [asyncio.create_task(router.generate([n], Sampling())) for n in range(30)]
        await asyncio.sleep(0.01)
        assert [len(member.asked) for member in members] == [10, 10, 10]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with_router(act, 3)


def test_a_popular_prompt_does_not_pin_one_engine():
    async def act(router: Router, members: list[Recording]) -> None:
        for member in members:
            member.go.clear()
        tasks = [asyncio.create_task(router.generate([5], Sampling())) for _ in range(40)]
        await asyncio.sleep(0.01)
        counts = [len(member.asked) for member in members]
        assert sum(counts) == 40 and abs(counts[0] - counts[1]) <= SLACK
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in members:
            member.go.set()
            member.asked.clear()
        await router.generate([5], Sampling())
        assert sum(len(member.asked) for member in members) == 1, "a cancelled request still counts"

    with_router(act)


@pytest.mark.parametrize(("shared", "ahead"), [(WORTH * 20, SLACK), (WORTH * 3, 3), (CHUNK, 1), (0, 1)])
def test_prompts_that_begin_alike_go_together_as_far_as_it_pays(shared: int, ahead: int):
    """``ahead``: how many requests more an engine gets because it has the beginning."""

    async def act(router: Router, members: list[Recording]) -> None:
        for member in members:
            member.go.clear()
        start = list(range(shared))
        tasks: list[asyncio.Task[Any]] = []
        for n in range(ahead + 1):
            tasks.append(asyncio.create_task(router.generate([*start, 900 + n, *range(50)], Sampling())))
            await asyncio.sleep(0)
        await until(lambda: sum(len(member.asked) for member in members) == ahead + 1)
        assert [len(member.asked) for member in members] == [ahead, 1]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with_router(act)


def test_the_engine_with_the_longest_beginning_gets_the_request():
    async def act(router: Router, members: list[Recording]) -> None:
        for member in members:
            member.go.clear()
        base, tail = [*range(WORTH * 8)], [*range(500, 500 + WORTH * 8)]
        tasks = [
            asyncio.create_task(router.generate(tokens, Sampling())) for tokens in (base, [7], [*tail, 1], [8])
        ]
        await until(lambda: sum(len(member.asked) for member in members) == 4)
        assert {len(tokens) for tokens in members[0].asked} == {len(base), len(tail) + 1}
        tasks.append(asyncio.create_task(router.generate([9], Sampling())))
        tasks.append(asyncio.create_task(router.generate([*base, 3, 4], Sampling())))
        await until(lambda: sum(len(member.asked) for member in members) == 6)
        assert members[0].asked[-1] == (*base, 3, 4)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    with_router(act)


def test_beginnings():
    tokens = [*range(CHUNK * 2 + 3)]
    chain = beginnings(tokens)
    assert [b.tokens for b in chain] == [CHUNK, 2 * CHUNK, 2 * CHUNK + 3]
    assert beginnings(tokens[: 2 * CHUNK])[-1] == chain[1] and len(beginnings([])) == 1
    other = beginnings([*tokens[:CHUNK], 99, *tokens[CHUNK + 1 :]])
    assert other[0] == chain[0] and not {b.key for b in other[1:]} & {b.key for b in chain}
    shifted = beginnings([0, *tokens])
    assert not {b.key for b in shifted} & {b.key for b in chain}
    known = Prefixes(remembered=4)
    known.note(chain, 1)
    known.note(chain[:1], 2)
    assert known.find(chain, {0, 1, 2}) == (frozenset({1}), 2 * CHUNK + 3, True)
    assert known.find(chain, {2}) == (frozenset({2}), CHUNK, False)
    assert known.find(other, {0, 1, 2}) == (frozenset({1, 2}), CHUNK, False)
    known.note(beginnings([5]), 0)
    known.note(beginnings([6]), 0)
    assert not known.find(chain, {1}).whole and known.find(chain, {1}).tokens, "the longest is forgotten first"
    known.forget(1)
    assert known.find(chain, {1}).members == frozenset()
    known.clear()
    assert known.find(beginnings([6]), {0}).members == frozenset()


# weights


def test_nothing_is_passed_on_while_weights_differ():
    async def act(router: Router, members: list[Recording]) -> None:
        await router.fetch(manifest(V1))
        members[1].may_switch.clear()
        switching = asyncio.create_task(router.activate(V1))
        await until(lambda: members[0].version == V1)
        assert members[1].version == V0
        asking = asyncio.create_task(router.generate([1], Sampling()))
        await asyncio.sleep(0.01)
        assert not members[0].asked and not members[1].asked
        members[1].may_switch.set()
        await switching
        assert set((await asking).versions.tolist()) == {V1.packed}

    with_router(act)


def test_rolling_members_serve_while_others_switch_and_versions_do_not_fall():
    async def act(router: Router, members: list[Recording]) -> None:
        await router.fetch(manifest(V1))
        await router.generate([1], Sampling(), session="a")
        for member in members:
            member.may_switch.clear()
        switching = asyncio.create_task(router.activate(V1))
        await asyncio.sleep(0.01)
        during = await router.generate([2], Sampling(), session="b")
        assert set(during.versions.tolist()) == {V0.packed} and len(members[1].asked) == 1
        members[0].may_switch.set()
        await until(lambda: members[0].version == V1)
        risen = await router.generate([3], Sampling(), session="a")
        assert set(risen.versions.tolist()) == {V1.packed}, "the second member is closed now"
        again = await router.generate([3], Sampling(), session="a")
        assert set(again.versions.tolist()) == {V1.packed} and not switching.done()
        members[1].may_switch.set()
        await switching
        assert (await router.stats()).version == V1

    with_router(act, rolling=True)


def test_a_session_that_has_seen_new_weights_waits_for_them():
    async def act(router: Router, members: list[Recording]) -> None:
        await router.fetch(manifest(V1))
        members[1].may_switch.clear()
        switching = asyncio.create_task(router.activate(V1))
        await until(lambda: members[0].version == V1)
        await router.generate([3], Sampling(), session="a")
        members[0].break_(RoleLost("gone"))
        asked = len(members[2].asked)
        turn = asyncio.create_task(router.generate([3], Sampling(), session="a"))
        await asyncio.sleep(0.02)
        assert not turn.done() and len(members[2].asked) == asked, "the third member still has the old weights"
        members[1].may_switch.set()
        assert set((await turn).versions.tolist()) == {V1.packed}
        await switching

    with_router(act, 3, rolling=True)


@pytest.mark.parametrize("rolling", [False, True])
def test_weights_that_nobody_takes_are_an_error_and_change_nothing(rolling: bool):
    async def act(router: Router, members: list[Recording]) -> None:
        with pytest.raises(EngineError, match="were not fetched"):
            await router.activate(V1)
        assert not router.out
        await router.fetch(manifest(V1))
        members[0].refuses = EngineError("this one cannot")
        if rolling:
            with pytest.raises(EngineError, match="this one cannot"):
                await router.activate(V1)
            assert members[1].version == V0, "what the first refuses is not tried on the others"
            return
        await router.activate(V1)
        assert router.out == {0: "this one cannot."}
        done = await router.generate([1], Sampling())
        assert set(done.versions.tolist()) == {V1.packed}
        members[0].refuses = None
        await until(lambda: not router.out)
        assert members[0].version == V1

    with_router(act, rolling=rolling)


def test_a_switch_is_finished_without_its_caller():
    async def act(router: Router, members: list[Recording]) -> None:
        await router.fetch(manifest(V1))
        members[1].may_switch.clear()
        switching = asyncio.create_task(router.activate(V1))
        await until(lambda: members[0].version == V1)
        switching.cancel()
        await asyncio.gather(switching, return_exceptions=True)
        asking = asyncio.create_task(router.generate([1], Sampling()))
        await asyncio.sleep(0.01)
        assert not asking.done()
        members[1].may_switch.set()
        await asking
        assert members[1].version == V1 and not router.out

    with_router(act)


# engines that break


@pytest.mark.parametrize(
    "error", [RoleLost("engine-1 is gone"), EngineBroken("broke"), ConnectionResetError("cut")]
)
def test_requests_of_a_broken_engine_are_made_by_another(error: Exception, caplog: pytest.LogCaptureFixture):
    async def act(router: Router, members: list[Recording]) -> None:
        for member in members:
            member.go.clear()
        tasks = [asyncio.create_task(router.generate([n], Sampling(), session=str(n))) for n in range(6)]
        await until(lambda: sum(len(member.asked) for member in members) == 6)
        assert len(members[1].asked) == 3
        members[1].break_(error)
        await until(lambda: len(members[0].asked) == 6)
        members[0].go.set()
        assert len(await asyncio.gather(*tasks)) == 6 and members[0].done == 6
        assert list(router.out) == [1] and f"engine 1 is taken out: {error}" in caplog.text
        await asyncio.gather(*(router.generate([n], Sampling(), session=str(n)) for n in range(6)))
        assert len(members[1].asked) == 3, "it gets nothing while it is out"
        assert len(await router.score([1, 2, 3])) == 2
        stats = await router.stats()
        assert stats.own_tokens == 3, "of the one that serves"
        members[1].restart()
        await until(lambda: not router.out)
        assert "engine 1 is back" in caplog.text
        members[1].go.set()
        await asyncio.gather(*(router.generate([n], Sampling()) for n in range(50, 56)))
        assert len(members[1].asked) == 6

    with caplog.at_level(logging.WARNING):
        with_router(act)


def test_a_request_that_is_refused_is_not_given_to_others():
    async def act(router: Router, members: list[Recording]) -> None:
        for error in (RequestTooLarge("too long"), EngineError("no"), DeadlineExceeded("late")):
            members[0].refuses = error
            with pytest.raises(type(error)):
                await router.generate([1], Sampling())
            assert not members[1].asked and not router.out

    with_router(act)


def test_a_request_that_breaks_every_engine_stops_at_three():
    async def act(router: Router, members: list[Recording]) -> None:
        for member in members:
            member.refuses = EngineBroken("this prompt is poison")
        with pytest.raises(EngineBroken, match="poison"):
            await router.generate([1], Sampling())
        assert sorted(len(member.asked) for member in members) == [0, 0, 1, 1, 1]

    with_router(act, 5)


def test_an_engine_that_comes_back_between_fetch_and_switch_has_what_the_others_fetched():
    async def act(router: Router, members: list[Recording]) -> None:
        members[0].break_(RoleLost("gone"))
        await router.generate([1], Sampling())
        await router.fetch(manifest(V1))
        members[0].restart(V0)
        await until(lambda: not router.out)
        assert members[0].version == V0 and V1 in members[0].fetched
        await router.activate(V1)
        assert [member.version for member in members] == [V1] * len(members) and not router.out

    with_router(act)


def test_an_engine_comes_back_with_the_weights_in_force_and_its_share():
    async def act(router: Router, members: list[Recording]) -> None:
        await router.allot(Allotment(2, (4, 5)))
        await router.generate([1], Sampling())
        members[1].break_(RoleLost("gone"))
        await router.fetch(manifest(V1))
        await router.activate(V1)
        await router.pause()
        members[1].restart(V0)
        await until(lambda: not router.out)
        assert members[1].version == V1 and members[1].share == Allotment(1, (5,)) and members[1].paused
        members[1].break_(RoleLost("gone"))
        await router.resume()
        await router.fetch(manifest(V2))
        assert list(router.out) == [1]
        members[1].restart(Version(1, 5))
        await asyncio.sleep(0.05)
        assert list(router.out) == [1], "nobody else has these weights"
        members[1].restart(V0)
        await until(lambda: not router.out)
        assert members[1].version == V1 and not members[1].paused
        await router.activate(V2)
        await until(lambda: members[1].version == V2 and not router.out)

    with_router(act)


def test_old_weights_are_noticed_before_any_were_switched():
    async def act(router: Router, members: list[Recording]) -> None:
        for member in members:
            member.version = V1
        await router.generate([1], Sampling())
        members[1].break_(RoleLost("gone"))
        await router.stats()
        members[1].restart(V0)
        await asyncio.sleep(0.05)
        assert list(router.out) == [1] and members[1].version == V0
        members[1].restart(V1)
        await until(lambda: not router.out)

    with_router(act)


def test_an_engine_that_was_started_again_unnoticed_is_noticed(caplog: pytest.LogCaptureFixture):
    async def act(router: Router, members: list[Recording]) -> None:
        await router.fetch(manifest(V1))
        await router.activate(V1)
        for notice in (lambda: router.generate([1], Sampling(), session="a"), router.stats):
            members[0].restart(V0)
            await notice()
            assert list(router.out) == [0] and "answers with weights 1.0, and was given 1.1" in router.out[0]
            await until(lambda: not router.out)
            assert members[0].version == V1
        assert len(members[1].asked) == 1, "the completion of old weights was made again"

    with_router(act)


def test_when_all_are_out_requests_wait_a_while():
    async def act(router: Router, members: list[Recording]) -> None:
        for member in members:
            member.break_(RoleLost("gone"))
        with pytest.raises(RoleLost, match="gone"):
            await router.generate([1], Sampling())
        with pytest.raises(RoleLost, match=r"none of the 2 engines serves any more: gone"):
            await router.generate([1], Sampling())
        for work in (router.stats(), router.fetch(manifest(V1)), router.activate(V1)):
            with pytest.raises(RoleLost):
                await work
        waiting = asyncio.create_task(router.generate([1], Sampling()))
        await asyncio.sleep(0)
        members[1].restart()
        assert (await waiting).stop == "length" and list(router.out) == [0]

    with_router(act, patience_s=0.5)


def test_a_lost_engine_does_not_keep_weights_from_the_others():
    async def act(router: Router, members: list[Recording]) -> None:
        await router.fetch(manifest(V1))
        members[1].break_(RoleLost("engine-1 is gone"))
        await router.activate(V1)
        done = await router.generate([1], Sampling())
        assert set(done.versions.tolist()) == {V1.packed} and "engine-1 is gone" in router.out[1]

    with_router(act)


def test_a_silent_engine_is_questioned_and_taken_out():
    async def act(router: Router, members: list[Recording]) -> None:
        members[0].go.clear()
        with pytest.raises(DeadlineExceeded):
            await router.generate([1], Sampling(), timeout_s=0.02)
        await asyncio.sleep(0.1)
        assert not router.out, "it is slow, and it answers"
        members[0].mute = True
        with pytest.raises(DeadlineExceeded):
            await router.generate([1], Sampling(), timeout_s=0.02)
        await until(lambda: list(router.out) == [0])
        assert (await router.generate([1], Sampling())).stop == "length" and len(members[1].asked) == 1
        members[0].mute = False
        await until(lambda: not router.out)

    with_router(act, probe_s=0.05)


def test_a_request_that_no_engine_has_can_be_aborted():
    async def act(router: Router, members: list[Recording]) -> None:
        await router.fetch(manifest(V1))
        for member in members:
            member.may_switch.clear()
        switching = asyncio.create_task(router.activate(V1))
        await asyncio.sleep(0.01)
        waiting = [asyncio.create_task(router.generate([n], Sampling(), session=str(n))) for n in range(2)]
        await asyncio.sleep(0.01)
        assert await router.abort("1") == 1
        done = await waiting[1]
        assert done.stop == "abort" and len(done.tokens) == 0 and not waiting[0].done()
        with pytest.raises(UnknownSession):
            await router.abort("none")
        for member in members:
            member.may_switch.set()
        await switching
        assert (await waiting[0]).stop == "length"
        assert await router.abort() == 0
        await router.fetch(manifest(V2))
        for member in members:
            member.may_switch.clear()
        switching = asyncio.create_task(router.activate(V2))
        await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceeded, match="no engine took the request"):
            await router.generate([9], Sampling(), timeout_s=0.05)
        for member in members:
            member.may_switch.set()
        await switching

    with_router(act)


def test_a_real_engine_that_breaks_loses_nothing(tmp_path: Path):
    save_model(random_decoder(seed=1, std=0.2), tmp_path / "m", ByteTokenizer())
    config = NativeConfig(max_running=4, cache_tokens=1024, dtype="float32", kernels=False)

    async def go() -> None:
        members = [open_engine(tmp_path / "m", config, V0) for _ in range(2)]
        router = Router(members)
        prompts = [[*f"prompt {n}".encode()] for n in range(6)]

        async def all_of_them() -> list[list[int]]:
            wanted = (router.generate(p, Sampling(max_tokens=40, seed=n)) for n, p in enumerate(prompts))
            return [done.tokens.tolist() for done in await asyncio.gather(*wanted)]

        expected = await all_of_them()
        stepper: Any = members[1]._stepper
        step, steps = stepper.step, 0

        def fails() -> Any:
            nonlocal steps
            steps += 1
            if steps == 8:
                raise RuntimeError("a bit fell over")
            return step()

        stepper.step = fails
        assert await all_of_them() == expected and steps == 8
        assert "a bit fell over" in router.out[1]
        await router.close()

    asyncio.run(asyncio.wait_for(go(), 60))


event = st.one_of(
    st.tuples(st.just("break"), st.integers(0, 2)),
    st.tuples(st.just("restart"), st.integers(0, 2)),
    st.tuples(st.just("update"), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 6)),
)


class Drawing(Recording):
    """An engine whose completions take a few turns of the loop, each token of the weights of its moment."""

    async def generate(
        self, tokens: list[int], sampling: Sampling, *, session: str = "", timeout_s: float = 600.0
    ) -> Completion:
        versions: list[int] = []
        life = self._broke
        for _ in range(sampling.max_tokens):
            await self._alive()
            if self._broke is not life:
                raise RoleLost("it was started again")
            versions.append(self.version.packed)
        zeros = np.zeros(len(versions), np.float32)
        ids = np.zeros(len(versions), np.int32)
        return Completion(ids, zeros, zeros, zeros, np.array(versions, np.int64), "length", 0)


@settings(max_examples=60, deadline=None)
@given(events=st.lists(event, max_size=25), rolling=st.booleans())
def test_no_request_is_lost_and_versions_never_fall(events: list[tuple[str, int]], rolling: bool) -> None:
    async def go() -> None:
        members = [Drawing() for _ in range(3)]
        router = Router(members, rolling=rolling, patience_s=5, first_probe_s=0.001)  # type: ignore[arg-type]
        over = False
        turns = failures = 0

        async def session(number: int) -> None:
            nonlocal turns, failures
            last = 0
            turn = 0
            while not over or turn < 3:
                turn += 1
                sampling = Sampling(max_tokens=1 + (number + turn) % 5)
                try:
                    done = await router.generate([number] * (turn + 1), sampling, session=str(number))
                except RoleLost:
                    failures += 1  # three engines broke under it: it is told, not lost
                    await asyncio.sleep(0.001)
                    continue
                turns += 1
                versions = done.versions.tolist()
                assert len(versions) == sampling.max_tokens, "one completion, whole"
                assert versions == sorted(versions) and versions[0] >= last, "the versions of a session fell"
                last = versions[-1]

        sessions = [asyncio.create_task(session(n)) for n in range(4)]
        newest = V0
        for kind, argument in events:
            if kind == "break":
                members[argument].break_(RoleLost(f"engine {argument} is gone"))
            elif kind == "restart" and members[argument].fails is not None:
                members[argument].restart(V0)
            elif kind == "update":
                version = Version(1, newest.n + 1)
                try:
                    await router.fetch(manifest(version))
                    await router.activate(version)
                except RoleLost:
                    pass  # all of them are out
                else:
                    newest = version
            for _ in range(argument if kind == "wait" else 1):
                await asyncio.sleep(0)
        for member in members:
            if member.fails is not None:
                member.restart(V0)
        over = True
        await asyncio.gather(*sessions)
        await asyncio.gather(router.stats(), return_exceptions=True)
        await until(lambda: not router.out)
        assert {member.version for member in members} == {newest}
        assert turns >= 3 * len(sessions) - failures
        await router.close()

    asyncio.run(asyncio.wait_for(go(), 30))


def test_cores_are_divided():
    assert Allotment(4, (0, 1, 2, 3)).divided(2) == [Allotment(2, (0, 2)), Allotment(2, (1, 3))]
    assert Allotment(1, (0,)).divided(2) == [Allotment(1, (0,))] * 2
    assert Allotment(2, ()).divided(2) == [Allotment(1, ())] * 2

    async def act(router: Router, members: list[Recording]) -> None:
        await router.allot(Allotment(2, (4, 5)))
        assert [member.share for member in members] == [Allotment(1, (4,)), Allotment(1, (5,))]

    with_router(act)
    with pytest.raises(ConfigError, match="at least one"):
        Router([])
