"""Runs a model over held-out tasks: one greedy attempt each, on one weight version from start to end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from lehr.core.reward import Valid
from lehr.core.task import Split
from lehr.core.trace import Sampling
from lehr.domains.catalogue import Domain
from lehr.rollout.base import Judged
from lehr.rollout.group import GroupPlan, GroupRunner


@dataclass(frozen=True, slots=True)
class Result:
    """One measured task. ``valid`` is False when it could not be judged; it then counts nowhere."""

    domain: str
    task_id: str
    index: int
    passed: bool
    valid: bool
    judged: Judged


@dataclass(frozen=True, slots=True)
class Suite:
    """What to measure: the first ``count`` tasks of a split of each domain."""

    domains: Mapping[str, Domain]
    split: Split
    count: int
    seed: int = 0

    def cells(self) -> list[tuple[str, int]]:
        """Return (domain, index) of every task, domains taking turns so that batches mix."""
        sizes = {
            name: min(self.count, domain.card.splits.get(self.split, 0))
            for name, domain in self.domains.items()
        }
        return [
            (name, index)
            for index in range(max(sizes.values(), default=0))
            for name in sizes
            if index < sizes[name]
        ]


async def run_suite(
    runner: GroupRunner,
    suite: Suite,
    *,
    label: str,
    concurrency: int,
    on_result: Callable[[Result], None],
    skip: Collection[str] = (),
    sampling: Sampling | None = None,
) -> list[Result]:
    """Measure and return one result a task, in the order in which they end.

    on_result sees each result as it comes. Tasks whose id is in ``skip`` are left out. A task that could
    not be judged is tried once more before it is reported as not valid.
    """
    greedy = sampling or Sampling(temperature=0.0)
    gate = asyncio.Semaphore(concurrency)
    results: list[Result] = []

    async def one(name: str, index: int) -> None:
        domain = suite.domains[name]
        problem = domain.problem(suite.split, index)
        if problem.task.id in skip:
            return
        judged: Judged | None = None
        for retry in range(2):
            plan = GroupPlan(
                f"{label}-{name.replace('/', '.')}-{index}", domain, problem, 1, greedy, suite.seed, retry
            )
            async with gate:
                judged = (await runner.run(plan)).members[0]
            if isinstance(judged.reward, Valid):
                break
        if judged is None:
            return
        valid = isinstance(judged.reward, Valid)
        passed = isinstance(judged.reward, Valid) and judged.reward.passed
        result = Result(name, problem.task.id, index, passed, valid, judged)
        results.append(result)
        on_result(result)

    async with asyncio.TaskGroup() as tasks:
        for name, index in suite.cells():
            tasks.create_task(one(name, index))
    return results


def tally(results: Sequence[Result]) -> dict[str, tuple[int, int]]:
    """Return (passed, judged) per domain."""
    counts: dict[str, tuple[int, int]] = {}
    for result in results:
        if result.valid:
            passed, total = counts.get(result.domain, (0, 0))
            counts[result.domain] = (passed + result.passed, total + 1)
    return counts
