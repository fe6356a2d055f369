"""Which cached block goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

PROTECTED_SHARE = 0.8
"""Share of the pool that blocks which were used again may take before the oldest of them lose that rank."""


class SegmentedLru:
    """Segmented least recently used (Karedla et al. 1994). What was used once waits in one queue, what was used
    again in another; the first is emptied before the second. A flood of prompts that come once passes by a
    system prompt that many share. A block that the second queue has no room for starts again in the first.
    """

    def __init__(self, total: int) -> None:
        self._room = max(1, int(total * PROTECTED_SHARE))
        self._once: OrderedDict[int, None] = OrderedDict()
        self._again: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int, *, reused: bool) -> None:
        """Add the most recently used block."""
        (self._again if reused else self._once)[block] = None
        if len(self._again) > self._room:
            demoted, _ = self._again.popitem(last=False)
            self._once[demoted] = None

    def pop(self) -> int:
        """Take out the block that is missed least."""
        block, _ = (self._once or self._again).popitem(last=False)
        return block

    def remove(self, block: int) -> None:
        """Take out a block that is in here."""
        if block in self._once:
            del self._once[block]
        else:
            del self._again[block]

    def clear(self) -> None:
        """Take out all."""
        self._once.clear()
        self._again.clear()

    def __len__(self) -> int:
        return len(self._once) + len(self._again)

    def __iter__(self) -> Iterator[int]:
        yield from self._once
        yield from self._again

    def __contains__(self, block: int) -> bool:
        return block in self._once or block in self._again
