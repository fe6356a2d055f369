"""Blocks that leave memory come back as they were, or not at all."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lehr.core.errors import ConfigError
from lehr.core.trace import Sampling
from lehr.engine.native.engine import NativeEngine
from lehr.engine.native.eviction import SegmentedLru
from lehr.engine.native.tiers import prefetch
from lehr.engine.native.tiers.codec import Damaged, pack, unpack
from lehr.engine.native.tiers.folder import SegmentFolder
from lehr.engine.native.tiers.rates import AGAIN, Choice
from lehr.engine.native.tiers.store import Tiers

GREEDY = Sampling(temperature=0, max_tokens=4)
NAME = b"0123456789abcdef"


def numbers(count: int, seed: int = 0) -> np.ndarray:
    drawn = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return (drawn.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)  # as bfloat16


@contextmanager
def opened(memory: int, disk: int, folder: Path) -> Iterator[Tiers]:
    tiers = Tiers(memory, disk, folder, 2)
    try:
        yield tiers
    finally:
        tiers.close()


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
def test_a_segment_is_unpacked_as_it_was(item_bytes: int) -> None:
    raw = np.random.default_rng(0).integers(0, 256, 4096 * item_bytes, dtype=np.uint8)
    assert (unpack(NAME, pack(NAME, raw, item_bytes), raw.nbytes, item_bytes) == raw).all()


def test_exponents_get_smaller() -> None:
    raw = numbers(1 << 16)
    assert len(pack(NAME, raw, 2)) < 0.8 * raw.nbytes


@pytest.mark.parametrize("at", [0, 20, 30, -1])
def test_e14_a_changed_byte_is_noticed(at: int) -> None:
    packed = bytearray(pack(NAME, numbers(4096), 2))
    packed[at] ^= 1
    with pytest.raises(Damaged):
        unpack(NAME, bytes(packed), 8192, 2)
    with pytest.raises(Damaged):
        unpack(NAME, bytes(packed[:100]), 8192, 2)


def test_e14_a_segment_under_another_name_is_noticed() -> None:
    with pytest.raises(Damaged):
        unpack(NAME[::-1], pack(NAME, numbers(4096), 2), 8192, 2)


def test_tiers_keep_to_their_bounds_and_the_oldest_goes(tmp_path: Path) -> None:
    with opened(20_000, 40_000, tmp_path) as tiers:
        for n in range(12):
            assert tiers.store(bytes([n]) * 16, numbers(5000, n))
            assert tiers.drain()
            stats = tiers.stats()
            assert stats.memory_bytes <= 20_000 and stats.disk_bytes <= 40_000
        there = [tiers.read(bytes([n]) * 16) for n in range(12)]
        assert there[:4] == [None] * 4 and stats.dropped >= 4
        for n, found in enumerate(there):
            assert found is None or (found[1] == numbers(5000, n)).all()
        assert {found[0] for found in there if found} == {"memory", "disk"}
        files = list(tmp_path.glob("*/*.kv"))
        assert sum(f.stat().st_size for f in files) == stats.disk_bytes > 0
        assert all(stat.S_IMODE(f.stat().st_mode) == 0o600 for f in files)
        assert all(stat.S_IMODE(f.stat().st_mode) == 0o700 for f in tmp_path.iterdir())
    assert not list(tmp_path.iterdir()), "nothing is left"


def test_e14_damaged_short_and_missing_files_are_misses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(0, 1 << 20, tmp_path) as tiers:
        for n in range(4):
            tiers.store(bytes([n]) * 16, numbers(5000, n))
        assert tiers.drain()
        flipped, cut, gone = (next(tmp_path.glob(f"*/{(bytes([n]) * 16).hex()}.kv")) for n in range(3))
        flipped.write_bytes(flipped.read_bytes()[:-1] + b"?")
        cut.write_bytes(cut.read_bytes()[:50])
        gone.unlink()
        with caplog.at_level(logging.WARNING):
            assert [tiers.read(bytes([n]) * 16) for n in range(3)] == [None] * 3
        assert len(caplog.records) == 3 and tiers.stats().damaged == 3
        assert tiers.find(b"\0" * 16) is None, "it is not tried again"
        found = tiers.read(b"\3" * 16)
        assert found is not None and (found[1] == numbers(5000, 3)).all()


def test_e14_loads_that_race_stores_and_evictions_see_whole_segments(tmp_path: Path) -> None:
    wrong: list[int] = []
    found = 0
    with opened(30_000, 60_000, tmp_path) as tiers:
        writer = threading.Thread(
            target=lambda: [tiers.store(bytes([n % 24]) * 16, numbers(5000, n % 24)) for n in range(150)]
        )
        writer.start()
        deadline = time.monotonic() + 20
        number = 0
        while (writer.is_alive() or number < 200) and time.monotonic() < deadline:
            number += 1
            n = number * 7 % 24
            read = tiers.read(bytes([n]) * 16)
            found += read is not None
            if read is not None and not (read[1] == numbers(5000, n)).all():
                wrong.append(n)
        writer.join()
        assert found and not wrong and tiers.stats().damaged == 0


def test_a_full_disk_costs_the_segment_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: SegmentFolder, name: bytes, packed: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SegmentFolder, "write", full)
    with opened(0, 1 << 20, tmp_path) as tiers:
        tiers.store(NAME, numbers(5000))
        assert tiers.drain() and tiers.find(NAME) is None
        assert tiers.stats().disk_bytes == tiers.stats().memory_bytes == 0


def test_what_a_killed_engine_left_is_swept_and_the_living_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lehr.engine.native.tiers.folder.YOUNG_S", -1.0)
    dead, alive = SegmentFolder(tmp_path), SegmentFolder(tmp_path)
    dead.write(NAME, b"x")
    os.close(dead._lock)  # what the kernel does for a process that is killed
    dead._lock = -1
    third = SegmentFolder(tmp_path)
    assert not dead.path.exists() and alive.path.exists()
    alive.close()
    third.close()
    assert not list(tmp_path.iterdir())


def test_a_tier_is_used_only_where_it_is_faster() -> None:
    choice = Choice()
    assert choice.loading_pays(1000, {"disk": 1000}), "what was never measured is tried"
    choice.compute.note(1000, 1.0)
    choice.load["disk"].note(1000, 3.0)
    assert [choice.loading_pays(1000, {"disk": 1000}) for _ in range(AGAIN + 2)] == [False] * AGAIN + [
        True,
        False,
    ]
    for _ in range(20):
        choice.load["disk"].note(1000, 0.1)
    assert choice.loading_pays(1000, {"disk": 1000}) and choice.refused == AGAIN + 1


def test_what_is_shared_by_many_survives_a_flood() -> None:
    lru = SegmentedLru(10)
    for block in range(4):
        lru.add(block, reused=block < 2)
    for block in range(4, 8):
        lru.add(block, reused=False)
    assert [lru.pop() for _ in range(8)] == [2, 3, 4, 5, 6, 7, 0, 1]
    for block in range(10):
        lru.add(block, reused=True)
    assert lru.pop() == 0, "what was used again long ago is not kept for ever"


def test_a_system_prompt_stays_while_one_off_prompts_pass(bench: Any) -> None:
    engine = bench.engine(cache_tokens=640)
    system = bench.prompt(200)
    for seed in range(3):
        bench.run(engine, engine.submit([*system, *bench.prompt(9, seed)], GREEDY))
    for seed in range(8):
        bench.run(engine, engine.submit(bench.prompt(150, 50 + seed), GREEDY))
    again = engine.submit([*system, *bench.prompt(9, 9)], GREEDY)
    bench.run(engine, again)
    assert again.cached_tokens >= 200


@contextmanager
def tiered(bench: Any, folder: Path, **settings: Any) -> Iterator[NativeEngine]:
    sizes = {"tier_memory_bytes": 100_000, "tier_disk_bytes": 1 << 24, "tier_folder": str(folder)}
    engine = bench.engine(**(sizes | {"cache_tokens": 512} | settings))
    try:
        yield engine
    finally:
        engine.close()
    assert not list(folder.iterdir())


def fill(bench: Any, engine: NativeEngine, count: int = 4, length: int = 300) -> list[Any]:
    """Run prompts that the pool has no room for together."""
    done = [engine.submit(bench.prompt(length, seed), GREEDY) for seed in range(count)]
    bench.run(engine, *done)
    assert engine._tiers is not None and engine._tiers.tiers.drain()
    return done


def test_e8_an_idle_context_comes_back_from_the_tiers(bench: Any, tmp_path: Path) -> None:
    with tiered(bench, tmp_path) as engine:
        for first in fill(bench, engine):
            computed = engine.computed_tokens
            turn = engine.submit([*first.tokens, *bench.prompt(5, 1)], GREEDY)
            bench.run(engine, turn)
            assert turn.cached_tokens >= 296 and engine.computed_tokens - computed < 32
            assert bench.agrees(turn)
        stats = engine.stats().tiers
        assert stats.disk_hits > 0 and stats.chosen >= 3 and stats.refused == stats.damaged == 0
        assert 0 < stats.memory_bytes <= 100_000


def test_e14_a_damaged_tier_is_computed_again(bench: Any, tmp_path: Path) -> None:
    with tiered(bench, tmp_path, tier_memory_bytes=0) as engine:
        first = fill(bench, engine)[0]
        for number, file in enumerate(sorted(tmp_path.glob("*/*.kv"))):
            if number % 2:
                file.unlink()
            else:
                file.write_bytes(file.read_bytes()[:-1] + b"?")
        again = engine.submit(first.tokens, GREEDY)
        bench.run(engine, again)
        assert bench.agrees(again)
        assert engine.stats().tiers.damaged > 0 and engine.stats().blocks_held == 0


def test_e1_e14_other_weights_find_nothing_in_the_tiers(bench: Any, tmp_path: Path) -> None:
    with tiered(bench, tmp_path) as engine:
        first = fill(bench, engine)[0]
        waiting = engine.submit(first.tokens, GREEDY)
        engine.step()
        bench.swap(engine, seed=2)
        bench.run(engine, waiting)
        assert waiting.cached_tokens == 0 and bench.agrees(waiting, 2)
        assert engine.stats().tiers.disk_bytes == engine.stats().tiers.memory_bytes == 0


def test_decoding_goes_on_while_a_prefix_is_loaded(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiered(bench, tmp_path, cache_tokens=1024) as engine:
        first = fill(bench, engine, 8)[0]
        gate = threading.Event()
        read = Tiers.read

        def slow(self: Tiers, name: bytes) -> Any:
            gate.wait(20)
            return read(self, name)

        monkeypatch.setattr(Tiers, "read", slow)
        decoding = engine.submit(bench.prompt(20, 99), Sampling(temperature=0, max_tokens=12))
        idle = engine.submit([*first.tokens, 1, 2], GREEDY)
        for _ in range(14):
            engine.step()
        assert decoding.finished and idle.own == 0, "the one goes on, the other waits for its blocks"
        gate.set()
        bench.run(engine, idle)
        assert idle.cached_tokens >= 296 and bench.agrees(idle)


def test_a_load_that_hangs_holds_up_nobody_for_long(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "LATE_S", 0.3)
    monkeypatch.setattr(prefetch, "LATE", 0.0)
    with tiered(bench, tmp_path, cache_tokens=1024) as engine:
        first = fill(bench, engine, 8)[0]
        gate = threading.Event()

        def hangs(self: Tiers, name: bytes) -> None:
            gate.wait(20)

        monkeypatch.setattr(Tiers, "read", hangs)
        late = engine.submit([*first.tokens, 1, 2], GREEDY)
        bench.run(engine, late)
        assert bench.agrees(late) and engine.stats().blocks_held > 0, "the thread still has its blocks"
        gate.set()
        deadline = time.monotonic() + 10
        while engine.stats().blocks_held and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.stats().blocks_held == 0 and engine._scheduler.pool.audit() == []


def test_members_of_a_group_load_their_prefix_once(bench: Any, tmp_path: Path) -> None:
    with tiered(bench, tmp_path, cache_tokens=1024) as engine:
        first = fill(bench, engine, 8)[0]
        group = [engine.submit([*first.tokens, 7, n], GREEDY) for n in range(6)]
        before = engine.stats().tiers
        bench.run(engine, *group)
        after = engine.stats().tiers
        assert after.memory_hits + after.disk_hits - before.memory_hits - before.disk_hits <= 40
        assert all(r.cached_tokens >= 296 and bench.agrees(r) for r in group)


def test_disk_without_a_folder_is_refused(bench: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tier_folder is not set"):
        bench.engine(tier_disk_bytes=1 << 20)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot keep keys and values in"):
        bench.engine(tier_disk_bytes=1 << 20, tier_folder=str(tmp_path / "file"))
