"""Keeps as many groups in flight as admission grants, and passes each finished one on exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from lehr.rollout.base import Group
from lehr.rollout.group import GroupPlan


class Admit(Protocol):
    """How much work may be started; see ``schedule.admission``."""

    def capacity(self, version_n: int, started: int) -> int:
        """Return how many more groups may be started."""
        ...


class Dispatcher:
    """Starts groups while admission allows and hands each finished one to ``done``.

    plan: returns the next group, drawn and recorded. run: runs it. done: takes the finished group.
    A group counts as started until it is released: by training (the version rises) or by
    :meth:`release` when it was dropped, so that dropped work is replaced and accepted work is bounded.
    An exception of any group ends :meth:`run` with that exception.
    """

    def __init__(
        self,
        plan: Callable[[], GroupPlan | None],
        run: Callable[[GroupPlan], Awaitable[Group]],
        done: Callable[[Group], None],
        admission: Admit,
        *,
        concurrency: int,
    ) -> None:
        self._plan = plan
        self._run = run
        self._done = done
        self._admission = admission
        self._concurrency = concurrency
        self._started = 0
        self._running = 0
        self._version_n = 0
        self._changed = asyncio.Event()
        self._stopping = False

    @property
    def running(self) -> int:
        """Groups in flight."""
        return self._running

    def preload(self, started: int, version_n: int) -> None:
        """Take over the counts of a resumed run: groups accepted so far, and the version they led to."""
        self._started = started
        self._version_n = version_n

    def advance(self, version_n: int) -> None:
        """Tell that weights ``version_n`` are in force; admits the work that this allows."""
        self._version_n = version_n
        self._changed.set()

    def release(self, count: int = 1) -> None:
        """Give back the places of groups that were dropped."""
        self._started -= count
        self._changed.set()

    def stop(self) -> None:
        """Start nothing more; :meth:`run` returns when what runs has been cancelled."""
        self._stopping = True
        self._changed.set()

    async def run(self) -> None:
        """Dispatch until stopped. Groups still running then are cancelled."""
        async with asyncio.TaskGroup() as tasks:
            running: set[asyncio.Task[None]] = set()
            while not self._stopping:
                room = min(
                    self._admission.capacity(self._version_n, self._started),
                    self._concurrency - self._running,
                )
                for _ in range(max(0, room)):
                    plan = self._plan()
                    if plan is None:
                        break
                    self._started += 1
                    self._running += 1
                    task = tasks.create_task(self._one(plan))
                    running.add(task)
                    task.add_done_callback(running.discard)
                self._changed.clear()
                await self._changed.wait()
            for task in running:
                task.cancel()

    async def _one(self, plan: GroupPlan) -> None:
        try:
            group = await self._run(plan)
        finally:
            self._running -= 1
            self._changed.set()
        self._done(group)
