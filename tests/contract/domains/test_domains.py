"""What every built-in domain must keep: gold earns full marks, nothing earns nothing, splits stay apart."""

from __future__ import annotations

import asyncio
import json

import pytest

from lehr.core.episode import Turn
from lehr.core.reward import Reward, Valid
from lehr.core.task import Problem, Split
from lehr.domains.catalogue import Domain, find_domains, open_domain
from lehr.sandbox.base import Boxes
from lehr.sandbox.pool import Pool
from lehr.verify.compose import judge

DOMAINS = find_domains()
SPLITS: tuple[Split, ...] = ("train", "validation", "heldout")
FEW = 3
MANY = 60


async def play(domain: Domain, problem: Problem, turns: tuple[str, ...], boxes: Boxes) -> Reward:
    episode = await domain.environment().open(problem.task, boxes)
    try:
        for text in turns:
            if (await episode.step(Turn(text))).done:
                break
    finally:
        evidence = await episode.close()
    card = domain.card
    return await judge(
        problem.task,
        evidence,
        problem.gold,
        boxes,
        terms=card.reward,
        reward_range=card.reward_range,
        pass_at=card.pass_at,
    )


@pytest.mark.parametrize("name", DOMAINS)
def test_gold_earns_everything_and_nothing_earns_nothing(name: str) -> None:
    domain = DOMAINS[name]

    async def run() -> None:
        pool = Pool(warm=0, limit=3)
        try:
            for split in SPLITS:
                for index in range(FEW):
                    problem = domain.problem(split, index)
                    right = await play(domain, problem, problem.gold.answer, pool)
                    assert isinstance(right, Valid) and right.value == 1.0 and right.passed, problem.task
                    for null in ("", "DONE", problem.task.messages[-1].content):
                        empty = await play(domain, problem, (null,), pool)
                        assert isinstance(empty, Valid) and empty.value == 0.0, (problem.task, null)
        finally:
            await pool.close()

    asyncio.run(run())


@pytest.mark.parametrize("name", DOMAINS)
def test_the_same_index_is_the_same_problem(name: str) -> None:
    again = find_domains()[name]
    for split in SPLITS:
        for index in (0, 7):
            first, second = DOMAINS[name].problem(split, index), again.problem(split, index)
            assert first.task == second.task and first.gold == second.gold
            assert first.task.id == f"{name}@{again.digest}/{split}/{index}"


@pytest.mark.parametrize("name", DOMAINS)
def test_splits_share_no_question(name: str) -> None:
    asked: dict[Split, set[str]] = {
        split: {DOMAINS[name].problem(split, n).task.messages[-1].content for n in range(MANY)}
        for split in SPLITS
    }
    assert not asked["train"] & asked["heldout"]
    assert not asked["train"] & asked["validation"]
    assert not asked["validation"] & asked["heldout"]
    assert all(len(questions) > MANY // 2 for questions in asked.values())


@pytest.mark.parametrize("name", DOMAINS)
def test_gold_is_not_in_the_task(name: str) -> None:
    for index in range(FEW):
        problem = DOMAINS[name].problem("train", index)
        shown = problem.task.model_dump_json()
        assert not any(json.dumps(text)[1:-1] in shown for text in problem.gold.answer if len(text) > 20)
        assert repr(problem.gold) == "Gold(sealed)"
        assert problem.task.messages[0].role == "system"
        assert len(problem.task.messages[0].content.split()) <= 12


def test_enough_domains_of_each_kind() -> None:
    assert {"code/functions", "documents/invoices", "terminal/files"} <= set(DOMAINS)
    assert sum(name.startswith("reasoning/") for name in DOMAINS) >= 6
    assert all(domain.card.splits["heldout"] >= 100 for domain in DOMAINS.values())


@pytest.mark.parametrize("name", ["code/functions", "documents/invoices", "terminal/files"])
def test_thousands_of_distinct_tasks_at_every_level(name: str) -> None:
    tasks = [DOMAINS[name].problem("train", index).task for index in range(1000)]
    assert len({task.messages[-1].content for task in tasks}) > 700
    assert {task.level for task in tasks} == {0, 1, 2}


@pytest.mark.parametrize("split", ["train", "validation", "heldout"])
def test_every_task_on_files_asks_for_a_change(split: Split) -> None:
    domain = open_domain("terminal/files")
    for index in range(domain.card.splits[split]):
        gold = domain.problem(split, index).gold
        assert gold.data["start"] != gold.data["want"], index
