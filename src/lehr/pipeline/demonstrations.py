"""Demonstrations: gold answers of the train split as token sequences, turn by turn where there are turns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import numpy as np

from lehr.core.batch import Sample
from lehr.core.episode import Turn
from lehr.core.task import Problem
from lehr.domains.catalogue import Domain
from lehr.model.base import Renderer
from lehr.sandbox.base import Boxes


async def demonstrate(domain: Domain, problem: Problem, renderer: Renderer, boxes: Boxes) -> Sample:
    """Return one demonstration. A multi-turn answer is played through the real environment, so that the
    observations between its turns are the real ones; loss falls on the assistant's tokens only.
    """
    task = problem.task
    tokens = renderer.start(task.messages, task.tools)
    own = [False] * len(tokens)
    episode = await domain.environment().open(task, boxes)
    try:
        for number, text in enumerate(problem.gold.answer):
            said = renderer.complete(text)
            tokens = [*tokens, *said]
            own += [True] * len(said)
            observation = await episode.step(Turn(text))
            if observation.done or number + 1 == len(problem.gold.answer):
                break
            tokens = renderer.extend(tokens, observation.messages)
            own += [False] * (len(tokens) - len(own))
    finally:
        await asyncio.shield(episode.close())
    length = len(tokens)
    mask = np.asarray(own, np.bool_)
    return Sample(
        tokens=np.asarray(tokens, np.int32),
        own=mask,
        logprobs=np.zeros(length, np.float32),
        advantages=mask.astype(np.float32),
        prefix=domain.card.id,
        trace_id=task.id,
        domain=domain.card.id,
    )


async def demonstrations(
    domains: Mapping[str, Domain], total: int, renderer: Renderer, boxes: Boxes
) -> list[Sample]:
    """Return ``total`` demonstrations divided evenly over the domains (the first ones get the rest)."""
    if total == 0:
        return []
    share, extra = divmod(total, len(domains))
    wanted = [
        (domain, index)
        for position, domain in enumerate(domains.values())
        for index in range(min(share + (position < extra), domain.card.splits.get("train", 0)))
    ]
    gate = asyncio.Semaphore(8)

    async def one(domain: Domain, index: int) -> Sample:
        async with gate:
            return await demonstrate(domain, domain.problem("train", index), renderer, boxes)

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one(domain, index)) for domain, index in wanted]
    return [task.result() for task in running]
