"""Moves blocks between the pool and the tiers.

Down: requests note which blocks follow each other (:meth:`Prefetcher.note`), in segments that begin at
multiples of ``SEGMENT`` blocks. When a block is about to be evicted, every segment that it belongs to is
copied and queued, unless the tiers have it.

Up: when a request is queued, or has its turn, whose chain goes on in the tiers, blocks are allotted and a
thread reads into them while decoding goes on. Until then the request is passed over. If the thread takes much
longer than expected, or a segment turns out to be damaged, what is missing is computed.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from lehr.engine.base import TierStats
from lehr.engine.native.cache import BLOCK, BlockPool
from lehr.engine.native.tiers.rates import Choice
from lehr.engine.native.tiers.store import Tier, Tiers

SEGMENT = 16
"""Blocks per segment: 128 tokens."""
AT_ONCE = 2
"""Loads that are being read or wait to be, ahead of the requests whose turn it is."""
LATE, LATE_S = 4.0, 2.0
"""A load may take so many times what was expected, and so many seconds more, before its request goes on
without."""
JOIN_S = 30.0


@dataclass(eq=False, slots=True)
class Segment:
    """Blocks of a chain that follow each other. ``names`` are theirs, the last one names the segment."""

    names: tuple[bytes, ...]

    @property
    def name(self) -> bytes:
        """What the tiers know it by."""
        return self.names[-1]


@dataclass(frozen=True, slots=True)
class _Part:
    """A segment to read, and where its blocks from ``skip`` on go in the pool."""

    segment: Segment
    skip: int
    blocks: list[int]


@dataclass(eq=False, slots=True)
class Load:
    """Segments on their way into the pool. ``held``: blocks of the pool that the request had there already.
    ``arrived``: leading parts that are whole, written by the thread; valid once ``over``.
    """

    held: list[int]
    parts: list[_Part]
    deadline: float = 0.0
    arrived: int = 0
    over: bool = False
    given_up: bool = False
    hits: dict[Tier, int] = field(default_factory=lambda: {"memory": 0, "disk": 0})


class Prefetcher:
    """Used by the engine's thread only; owns the thread that reads, and the tiers."""

    def __init__(self, pool: BlockPool, tiers: Tiers) -> None:
        self._pool, self.tiers = pool, tiers
        self.choice = Choice()
        self._kv: NDArray[np.uint8] = pool.kv.view(torch.uint8).numpy()
        self._segments: dict[bytes, list[Segment]] = {}
        self._loads: list[Load] = []
        self._loading: set[bytes] = set()
        self._jobs: queue.SimpleQueue[Load | None] = queue.SimpleQueue()
        self._arrived = threading.Event()
        self._hits: dict[Tier, int] = {"memory": 0, "disk": 0}
        self._stored = self._refused = 0
        pool.before_eviction = self._evicting
        self._thread = threading.Thread(target=self._run, name="kv-prefetch", daemon=True)
        self._thread.start()

    def note(self, chain: Sequence[bytes], first: int, end: int) -> None:
        """Take note that the pool holds blocks ``first`` to ``end`` of ``chain``, and those before them."""
        for start in range(first // SEGMENT * SEGMENT, end, SEGMENT):
            names = tuple(chain[start : min(start + SEGMENT, end)])
            known = self._segments.get(names[0], [])
            if any(s.names[: len(names)] == names for s in known):
                continue
            for shorter in [s for s in known if names[: len(s.names)] == s.names]:
                self._forget(shorter)
                self.tiers.remove([shorter.name])
            segment = Segment(names)
            for name in names:
                self._segments.setdefault(name, []).append(segment)

    def begin(self, chain: Sequence[bytes], usable: int, reserve: int) -> Load | None:
        """Return a load of what the tiers hold beyond the pool of the first ``usable`` blocks of ``chain``; an
        empty one where computing is expected to be faster; None where there is nothing, or not enough blocks
        beside the ``reserve`` that others may need.
        """
        held: list[int] = []
        for block in map(self._pool.find, chain[:usable]):
            if block is None:
                break
            held.append(block)
        parts, tier_bytes = self._wanted(chain, len(held), usable)
        if not parts:
            return None
        room = self._pool.available - reserve - sum(map(self._pool.is_cached, held))
        while parts and sum(len(p.names) - skip for p, skip in parts) > room:
            parts.pop()
        tokens = BLOCK * sum(len(p.names) - skip for p, skip in parts)
        if not parts:
            return None
        if not self.choice.loading_pays(tokens, tier_bytes):
            return Load([], [])
        load = Load(held, [])
        for block in load.held:
            self._pool.hold(block)
        for segment, skip in parts:
            blocks = [self._pool.allot() for _ in segment.names[skip:]]
            load.parts.append(_Part(segment, skip, blocks))
            self._loading.update(segment.names)
        expected_s = max(self.choice.expected_s(tier_bytes), self.choice.compute.time(tokens) or 0.0)
        load.deadline = time.monotonic() + LATE_S + LATE * expected_s
        self._loads.append(load)
        self._jobs.put(load)
        return load

    def is_coming(self, name: bytes) -> bool:
        """Whether a load brings this block."""
        return name in self._loading

    @property
    def busy(self) -> int:
        """Loads that the thread has not finished."""
        return sum(not load.over for load in self._loads)

    def settled(self, load: Load) -> bool:
        """Return whether a load has come to its end, and make findable what it brought."""
        if not load.over and time.monotonic() > load.deadline:
            load.given_up = True
            self._loading.difference_update(*(part.segment.names for part in load.parts))
        self.settle()
        return load not in self._loads or load.given_up

    def settle(self) -> None:
        """Make findable what finished loads brought. What nobody waits for any more is let go."""
        for load in [one for one in self._loads if one.over]:
            self._loads.remove(load)
            for number, part in enumerate(load.parts):
                self._loading.difference_update(part.segment.names)
                for name, block in zip(part.segment.names[part.skip :], part.blocks, strict=True):
                    if number < load.arrived and not load.given_up:
                        self._pool.name(block, name)
                if number < load.arrived and not load.given_up:
                    self.note(part.segment.names, 0, len(part.segment.names))
            for tier, count in load.hits.items():
                self._hits[tier] += count
            if load.given_up:
                self._let_go(load)

    def release(self, load: Load) -> None:
        """Let go of the blocks of a load, now or when the thread has left them."""
        if load in self._loads:
            load.given_up = True
        elif not load.given_up:
            load.given_up = True
            self._let_go(load)

    def _let_go(self, load: Load) -> None:
        for block in reversed([*load.held, *(b for part in load.parts for b in part.blocks)]):
            self._pool.release(block)

    def wait(self, timeout_s: float) -> None:
        """Wait until a load is over, or for so long."""
        if all(not load.over for load in self._loads):
            self._arrived.wait(timeout_s)
        self._arrived.clear()

    def restart(self) -> None:
        """Forget everything: the weights are others."""
        self._segments.clear()
        for load in self._loads:
            load.given_up = True
        self.tiers.flush()
        self.settle()

    def stats(self) -> TierStats:
        """Return a snapshot."""
        return self.tiers.stats() + TierStats(
            stored_blocks=self._stored,
            memory_hits=self._hits["memory"],
            disk_hits=self._hits["disk"],
            dropped=self._refused,
            chosen=self.choice.chosen,
            refused=self.choice.refused,
        )

    def close(self) -> None:
        """End the threads and remove the files. Idempotent."""
        for load in self._loads:
            load.given_up = True
        self._jobs.put(None)
        self._thread.join(JOIN_S)
        self.tiers.close()

    def _wanted(
        self, chain: Sequence[bytes], at: int, usable: int
    ) -> tuple[list[tuple[Segment, int]], dict[str, int]]:
        """Return the segments that go on at block ``at``, with how many blocks of each are there already, and
        the bytes that each tier has to give.
        """
        parts: list[tuple[Segment, int]] = []
        tier_bytes = {"memory": 0, "disk": 0}
        while at < usable:
            start = at // SEGMENT * SEGMENT
            for end in range(min(start + SEGMENT, usable), at, -1):
                found = self.tiers.find(chain[end - 1])
                if found is not None:
                    parts.append((Segment(tuple(chain[start:end])), at - start))
                    tier_bytes[found[0]] += found[1]
                    break
            else:
                break
            at = end
            if end % SEGMENT:
                break
        return parts, tier_bytes

    def _evicting(self, block: int, names: Sequence[bytes]) -> None:
        for name in names:
            for segment in self._segments.get(name, [])[:]:
                self._forget(segment)
                if self.tiers.find(segment.name) is None:
                    self._store(segment)

    def _store(self, segment: Segment) -> None:
        blocks = [block for block in map(self._pool.find, segment.names) if block is not None]
        if len(blocks) < len(segment.names):
            return
        if self.tiers.store(segment.name, self._kv[:, :, blocks].reshape(-1)):
            self._stored += len(blocks)
        else:
            self._refused += 1

    def _forget(self, segment: Segment) -> None:
        for name in segment.names:
            others = self._segments.get(name, [])
            if segment in others:
                others.remove(segment)
            if not others:
                self._segments.pop(name, None)

    def _run(self) -> None:
        while (load := self._jobs.get()) is not None:
            try:
                self._read(load)
            finally:
                load.over = True
                self._arrived.set()

    def _read(self, load: Load) -> None:
        layers, both, _, *block_shape = self._kv.shape
        for part in load.parts:
            if load.given_up:
                return
            started = time.perf_counter()
            found = self.tiers.read(part.segment.name)
            if found is None:
                return
            tier, raw = found
            shaped = raw.reshape(layers, both, len(part.segment.names), *block_shape)
            self._kv[:, :, part.blocks] = shaped[:, :, part.skip :]
            load.hits[tier] += len(part.blocks)
            load.arrived += 1
            self.choice.load[tier].note(raw.nbytes, time.perf_counter() - started)
