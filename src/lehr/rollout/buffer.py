"""Finished groups wait here for their optimiser step, oldest first."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lehr.core.reward import Credit, Valid
from lehr.rollout.base import DropReason, Group


@dataclass(frozen=True, slots=True)
class Filled:
    """A batch's worth of groups."""

    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True)
class Starved:
    """Too many groups in a row taught nothing. What was kept so far is handed over all the same.

    A typed outcome instead of an endless wait: the stage decides whether to train on less, or to end.
    """

    groups: tuple[Group, ...]
    refused: int
    domains: Mapping[str, int]
    """How many of those refused came from each domain."""


def teaches(group: Group, credit: Credit = "value") -> DropReason | None:
    """Return None if the group has something to learn from, else the reason why it is dropped.

    A group of equal credit has zero advantage everywhere; a group with fewer than two valid members has
    no baseline.
    """
    values = [member.reward.credit(credit) for member in group.valid if isinstance(member.reward, Valid)]
    if len(values) < 2:
        return "no_survivors"
    if max(values) - min(values) < 1e-6:
        return "no_variance"
    return None


class Buffer:
    """Takes finished groups, refuses those that teach nothing, hands the rest over in batches.

    teaches: returns why a group is dropped, or None where it teaches something.
    on_drop: called once for each refused group, with the reason.
    refuse_limit: refused groups in a row, without one accepted, after which :meth:`take` returns.
    """

    def __init__(
        self,
        on_drop: Callable[[Group, DropReason], None],
        *,
        refuse_limit: int,
        teaches: Callable[[Group], DropReason | None] = teaches,
    ) -> None:
        self._teaches = teaches
        self._on_drop = on_drop
        self._refuse_limit = refuse_limit
        self._ready: deque[Group] = deque()
        self._refused: Counter[str] = Counter()
        self._dropped: Counter[tuple[DropReason, str]] = Counter()
        self._changed = asyncio.Event()
        self._failed: BaseException | None = None

    def __len__(self) -> int:
        return len(self._ready)

    def put(self, group: Group) -> None:
        """Add a finished group, or drop it if it teaches nothing."""
        reason = self._teaches(group)
        if reason is not None:
            self._refused[group.domain] += 1
            self._dropped[reason, group.domain] += 1
            self._on_drop(group, reason)
        else:
            self._refused.clear()
            self._ready.append(group)
        self._changed.set()

    def take_dropped(self) -> dict[tuple[DropReason, str], int]:
        """Return how many groups were refused since the last call, by reason and domain."""
        dropped = dict(self._dropped)
        self._dropped.clear()
        return dropped

    def fail(self, error: BaseException) -> None:
        """End every present and later :meth:`take` with ``error``."""
        self._failed = error
        self._changed.set()

    async def take(self, count: int) -> Filled | Starved:
        """Wait for ``count`` groups and remove them, oldest first."""
        while True:
            if self._failed is not None:
                raise self._failed
            if len(self._ready) >= count:
                return Filled(tuple(self._ready.popleft() for _ in range(count)))
            if (refused := self._refused.total()) >= self._refuse_limit:
                domains = dict(self._refused)
                self._refused.clear()
                groups = tuple(self._ready)
                self._ready.clear()
                return Starved(groups, refused, domains)
            self._changed.clear()
            await self._changed.wait()

    def drain(self) -> tuple[Group, ...]:
        """Remove and return what is left."""
        groups = tuple(self._ready)
        self._ready.clear()
        return groups
