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

from lehr.model.config import ModelConfig

SMALLEST = 128
FIRST_ROWS, MOST_ROWS, ROOM_BYTES = 8, 256, 1 << 30
"""Rows that a lane begins with: what the bytes hold, committed only as they are used. Growing copies."""


@dataclass(eq=False, slots=True)
class Slot:
    """A row of a lane. ``row`` changes when the lane is compacted."""

    lane: Lane
    row: int


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros whose memory is committed page by page, on first use."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


class Lane:
    """Rows of one capacity. ``kv`` is [layer, key or value, row, kv head, position, head size]."""

    def __init__(self, config: ModelConfig, capacity: int, rows: int, dtype: torch.dtype) -> None:
        self.capacity = capacity
        self.slots: list[Slot] = []
        self._config, self._dtype = config, dtype
        self.kv = self._room(rows)

    def _room(self, rows: int) -> Tensor:
        c = self._config
        return lazy_zeros((c.num_layers, 2, rows, c.num_kv_heads, self.capacity, c.head_size), self._dtype)

    def take(self) -> Slot:
        """Return a free row, growing the lane where needed."""
        used, room = len(self.slots), self.kv.shape[2]
        if used == room:
            grown = self._room(2 * room)
            grown[:, :, :used] = self.kv
            self.kv = grown
        slot = Slot(self, used)
        self.slots.append(slot)
        return slot

    def free(self, slot: Slot, length: int) -> None:
        """Give a row back. The last row, of at most ``length`` tokens, moves into its place."""
        last = self.slots.pop()
        if last is not slot:
            self.kv[:, :, slot.row, :, :length] = self.kv[:, :, last.row, :, :length]
            last.row = slot.row
            self.slots[slot.row] = last


class Rows:
    """All lanes. Capacities are powers of two."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self._config, self._dtype = config, dtype
        self.lanes: dict[int, Lane] = {}

    def take(self, tokens: int) -> Slot:
        """Return a row that has room for ``tokens``."""
        capacity = SMALLEST
        while capacity < tokens:
            capacity *= 2
        lane = self.lanes.get(capacity)
        if lane is None:
            c = self._config
            row = 2 * c.num_layers * c.num_kv_heads * capacity * c.head_size * self._dtype.itemsize
            rows = min(max(FIRST_ROWS, ROOM_BYTES // row), MOST_ROWS)
            lane = self.lanes[capacity] = Lane(self._config, capacity, rows, self._dtype)
        return lane.take()
