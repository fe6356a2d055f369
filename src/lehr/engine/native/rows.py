"""Working rows: the keys and values of running requests, laid out for attention.

A paged layout would have to be gathered into dense tensors in every layer of every step, which costs more
memory traffic than attention itself. So a running request has a dense row, filled from the block pool
when it joins and appended to in place; the pool keeps what may be shared. Rows of similar capacity share a
lane, so that a long request does not make short ones attend to padding. Rows in use are always the first
ones of their lane: when one is freed, the last moves into its place.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import torch
from torch import Tensor

from lehr.engine.native.quantise import stored_width
from lehr.model.config import ModelConfig

SMALLEST = 128
LONG, LONG_STEP = 1 << 14, 1 << 10
"""Tokens above which a row is a lane of its own, whose memory is given back with it, and what its size is
rounded up to."""
FAMILY = 16
"""Blocks of keys that share a bound (see ``sparse``)."""
FIRST_ROWS, MOST_ROWS, ROOM_BYTES = 8, 256, 1 << 30
"""Rows that a lane begins with: what the bytes hold, committed only as they are used. Growing copies."""


@dataclass(eq=False, slots=True)
class Slot:
    """A row of a lane. ``row`` changes when the lane is compacted. ``summarised``: tokens whose
    keys have bounds (see ``sparse``).
    """

    lane: Lane
    row: int
    summarised: int = 0


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros whose memory is committed page by page, on first use."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def token_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers, stored in ``dtype``."""
    c = config
    return 2 * c.num_layers * c.num_kv_heads * stored_width(c.head_size, dtype) * dtype.itemsize


class Lane:
    """Rows of one capacity. ``kv`` is [layer, key or value, row, kv head, position, stored width];
    ``bounds``, of blocks of keys and of families of blocks, are [layer, 1, row, kv head, family, lowest or
    highest, head size, member], and there are none without a ``block``.
    """

    def __init__(
        self, config: ModelConfig, capacity: int, rows: int, dtype: torch.dtype, block: int = 0
    ) -> None:
        self.capacity = capacity
        self.slots: list[Slot] = []
        self._config, self._dtype = config, dtype
        self._families = -(-capacity // (block * FAMILY)) if block else 0
        self.kv, *self.bounds = self._room(rows)

    def _room(self, rows: int) -> list[Tensor]:
        c = self._config
        width = stored_width(c.head_size, self._dtype)
        room = [lazy_zeros((c.num_layers, 2, rows, c.num_kv_heads, self.capacity, width), self._dtype)]
        families = self._families
        while families and len(room) < 3:
            shape = (c.num_layers, 1, rows, c.num_kv_heads, families, 2, c.head_size, FAMILY)
            room.append(lazy_zeros(shape, self._dtype))
            families = -(-families // FAMILY)
        return room

    def take(self) -> Slot:
        """Return a free row, growing the lane where needed."""
        used, room = len(self.slots), self.kv.shape[2]
        if used == room:
            grown = self._room(2 * room)
            for new, old in zip(grown, (self.kv, *self.bounds), strict=True):
                new[:, :, :used] = old
            self.kv, *self.bounds = grown
        slot = Slot(self, used)
        self.slots.append(slot)
        return slot

    def free(self, slot: Slot, length: int) -> None:
        """Give a row back. The last row, of at most ``length`` tokens, moves into its place."""
        last = self.slots.pop()
        if last is not slot:
            self.kv[:, :, slot.row, :, :length] = self.kv[:, :, last.row, :, :length]
            for bounds in self.bounds:
                bounds[:, :, slot.row] = bounds[:, :, last.row]
            last.row = slot.row
            self.slots[slot.row] = last


class Rows:
    """All lanes. Capacities are powers of two, but for long rows. ``dtype`` is what is stored: int8 is
    quantised. ``block``: tokens of a block that gets bounds; 0 is none.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, block: int = 0) -> None:
        self._config, self._dtype, self._block = config, dtype, block
        self.lanes: dict[int, Lane] = {}

    def take(self, tokens: int) -> Slot:
        """Return a row that has room for ``tokens``."""
        if tokens > LONG:
            capacity = -(-tokens // LONG_STEP) * LONG_STEP
            return Lane(self._config, capacity, 1, self._dtype, self._block).take()
        capacity = SMALLEST
        while capacity < tokens:
            capacity *= 2
        lane = self.lanes.get(capacity)
        if lane is None:
            c = self._config
            row = capacity * token_bytes(c, self._dtype)
            rows = min(max(FIRST_ROWS, ROOM_BYTES // row), MOST_ROWS)
            lane = self.lanes[capacity] = Lane(self._config, capacity, rows, self._dtype, self._block)
        return lane.take()
