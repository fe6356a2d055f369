"""Blocks of keys and values, and which prefixes they hold.

Every block is free, cached (its content may be asked for again; ``eviction`` says which goes first) or held by
requests. A prefix is named by a chain of hashes, one per block, seeded by the weight version and the
number format: what was computed under other weights cannot be found, by construction. The last, partly
filled block of a prompt is found as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lehr.core.trace import Version
from lehr.engine.native.eviction import SegmentedLru
from lehr.engine.native.quantise import stored_width
from lehr.engine.native.rows import Slot, lazy_zeros
from lehr.model.config import ModelConfig

BLOCK = 8
"""Tokens per block."""
TOGETHER = 32
"""Blocks that are copied by one operation."""


def root(version: Version, dtype: torch.dtype, policy: str = "exact") -> bytes:
    """Return the hash that every chain of this version, dtype and way of keeping and attending starts from."""
    return hashlib.blake2b(f"{version.packed}/{dtype}/{policy}".encode(), digest_size=16).digest()


def seed_of(root: bytes, adapter: bytes) -> bytes:
    """Return the hash that chains of an adapter start from, given its identity and the root of the version."""
    return hashlib.blake2b(adapter, key=root, digest_size=16).digest()


def link(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the hash of a block that holds ``tokens`` after ``parent``."""
    return hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), key=parent, digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Match:
    """What the cache holds of a prompt. blocks: whole ones, now held for the caller. part: a block whose
    first ``part_tokens`` also match; copy them before anything else is allotted.
    """

    blocks: list[int]
    part: int = -1
    part_tokens: int = 0


class BlockPool:
    """A fixed number of blocks. ``free + cached + held == total`` after every call."""

    def __init__(self, config: ModelConfig, total: int, dtype: torch.dtype) -> None:
        self.total = total
        c = config
        width = stored_width(c.head_size, dtype)
        self.kv = lazy_zeros((c.num_layers, 2, total, c.num_kv_heads, BLOCK, width), dtype)
        self._free = list(range(total - 1, -1, -1))
        self._cached = SegmentedLru(total)
        self._reused = bytearray(total)
        self._references = [0] * total
        self._held = 0
        self._by_hash: dict[bytes, int] = {}
        self._names: dict[int, list[bytes]] = {}
        self.before_eviction: Callable[[int, Sequence[bytes]], None] | None = None
        """Is told which block is about to be evicted, while it can still be found under its names."""

    @property
    def free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Blocks that nobody holds, but whose content can be found."""
        return len(self._cached)

    @property
    def held(self) -> int:
        """Blocks that at least one request holds."""
        return self._held

    @property
    def available(self) -> int:
        """Blocks that can be allotted."""
        return len(self._free) + len(self._cached)

    def allot(self) -> int:
        """Return a block, held once; evicts the one that is missed least if none is free."""
        if self._free:
            block = self._free.pop()
        else:
            block = self._cached.pop()
            if self.before_eviction is not None:
                self.before_eviction(block, tuple(self._names.get(block, ())))
            self._forget(block)
        self._references[block] = 1
        self._reused[block] = False
        self._held += 1
        return block

    def hold(self, block: int) -> None:
        """Hold a block once more, because its content is used again."""
        if self._references[block] == 0:
            self._cached.remove(block)
            self._held += 1
        self._references[block] += 1
        self._reused[block] = True

    def release(self, block: int) -> None:
        """Let go of a block once. The last one to let go leaves it cached if it can be found, else free."""
        self._references[block] -= 1
        if self._references[block] == 0:
            self._held -= 1
            if block in self._names:
                self._cached.add(block, reused=bool(self._reused[block]))
            else:
                self._free.append(block)

    def publish(self, block: int, name: bytes, slot: Slot, start: int, count: int) -> None:
        """Copy ``count`` tokens from a working row and make them findable under ``name``."""
        self.kv[:, :, block, :, :count] = slot.lane.kv[:, :, slot.row, :, start : start + count]
        self.name(block, name)

    def name(self, block: int, name: bytes) -> None:
        """Make what a block holds findable under ``name``, unless another block is."""
        if name not in self._by_hash:
            self._by_hash[name] = block
            self._names.setdefault(block, []).append(name)

    def is_cached(self, block: int) -> bool:
        """Whether nobody holds a block that can be found."""
        return block in self._cached

    def load(self, block: int, slot: Slot, start: int, count: int = BLOCK) -> None:
        """Copy the first ``count`` tokens of a block into a working row."""
        slot.lane.kv[:, :, slot.row, :, start : start + count] = self.kv[:, :, block, :, :count]

    def load_whole(self, blocks: Sequence[int], slot: Slot) -> None:
        """Copy whole blocks, one after another, to the beginning of a working row."""
        row = slot.lane.kv[:, :, slot.row]
        for first in range(0, len(blocks), TOGETHER):
            some = torch.tensor(blocks[first : first + TOGETHER])
            part = row[:, :, :, first * BLOCK : (first + len(some)) * BLOCK]
            part.unflatten(3, (-1, BLOCK)).copy_(self.kv[:, :, some].transpose(2, 3))

    def find(self, name: bytes) -> int | None:
        """Return the block that is published under ``name``."""
        return self._by_hash.get(name)

    def match(self, chain: Sequence[bytes], seed: bytes, tokens: Sequence[int], limit: int) -> Match:
        """Return what is cached of ``tokens``, ``limit`` of them at most. Whole blocks are held."""
        blocks: list[int] = []
        while (len(blocks) + 1) * BLOCK <= limit and len(blocks) < len(chain):
            block = self.find(chain[len(blocks)])
            if block is None:
                break
            self.hold(block)
            blocks.append(block)
        parent = chain[len(blocks) - 1] if blocks else seed
        start = len(blocks) * BLOCK
        for count in range(min(BLOCK, len(tokens) - start), 0, -1):
            block = self.find(link(parent, tokens[start : start + count]))
            if block is not None:
                return Match(blocks, block, min(count, limit - start))
        return Match(blocks)

    def flush(self) -> None:
        """Forget every published prefix. Blocks that are held stay held, no longer findable."""
        self._by_hash.clear()
        self._names.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def audit(self) -> list[str]:
        """Return what contradicts itself in the books: [] always, or there is a fault in this class."""
        faults: list[str] = []
        for block, count in enumerate(self._references):
            places = (block in self._free) + (block in self._cached) + (count > 0)
            if places != 1 or count < 0:
                faults.append(f"block {block} is in {places} states, held {count} times")
        faults += [
            f"{n.hex()} names block {b}" for n, b in self._by_hash.items() if n not in self._names.get(b, ())
        ]
        return faults

    def _forget(self, block: int) -> None:
        for name in self._names.pop(block, ()):
            del self._by_hash[name]
