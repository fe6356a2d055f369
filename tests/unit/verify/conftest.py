"""Runs one judgement with the real pool."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lehr.core.episode import Evidence
from lehr.core.reward import Reward
from lehr.core.task import Gold, Message, RewardTerm, Task
from lehr.sandbox.base import Boxes
from lehr.sandbox.pool import Pool
from lehr.verify.compose import judge

Judging = Callable[..., Reward]


def task(**fields: Any) -> Task:
    return Task(id="test@0/train/0", domain="test", messages=(Message(role="user", content="q"),), **fields)


@pytest.fixture
def judge_code() -> Judging:
    """``judge_code(source, tests, files=...)``: what it is worth under ``run_unit_tests``."""

    def run(
        source: str,
        tests: Sequence[tuple[Sequence[Any], Any]],
        *,
        files: dict[str, bytes] | None = None,
        wrap: Callable[[Boxes], Boxes] | None = None,
    ) -> Reward:
        async def inner() -> Reward:
            pool = Pool(warm=0, limit=2)
            try:
                return await judge(
                    task(),
                    Evidence("test", "", {"solution.py": source.encode(), **(files or {})}),
                    Gold((), {"entry": "f", "tests": [{"args": list(a), "want": w} for a, w in tests]}),
                    wrap(pool) if wrap else pool,
                    terms=(RewardTerm.model_validate("run_unit_tests"),),
                )
            finally:
                await pool.close()

        return asyncio.run(inner())

    return run


@pytest.fixture
def judge_plain() -> Judging:
    """``judge_plain(verifier, answer, gold, files=...)``: what evidence is worth where no box is needed."""

    def run(
        verifier: str, answer: str, gold: dict[str, Any], *, files: dict[str, bytes] | None = None
    ) -> Reward:
        return asyncio.run(
            judge(
                task(),
                Evidence("test", answer, files or {}),
                Gold((), gold),
                NoBoxes(),
                terms=(RewardTerm.model_validate(verifier),),
            )
        )

    return run


class NoBoxes:
    """For verifiers that must not need a box."""

    def lease(self, spec: Any, *, timeout_s: float = 30.0, **_: Any) -> Any:
        raise AssertionError("this verifier needs no box")

    async def acquire(self, spec: Any, *, timeout_s: float = 30.0, **_: Any) -> Any:
        raise AssertionError("this verifier needs no box")

    async def release(self, box: Any) -> None:
        raise AssertionError("this verifier needs no box")
