"""The model before and after a run, side by side on one prompt or on a domain's held-out tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lehr.core.reward import Reward
from lehr.core.task import Message, Task
from lehr.core.trace import Sampling
from lehr.domains.catalogue import Domain, open_domain
from lehr.pipeline.folder import RunFolder
from lehr.pipeline.models import locate_model, trained_model
from lehr.pipeline.observer import Observer, Silent
from lehr.pipeline.sampler import Sampler, open_sampler
from lehr.rollout.group import GroupPlan


@dataclass(frozen=True, slots=True)
class Said:
    """What one model answered; ``reward`` is None for a free prompt."""

    text: str
    reward: Reward | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt and both answers."""

    prompt: str
    before: Said
    after: Said


def try_run(
    run: Path,
    prompt: str | None = None,
    domain: str | None = None,
    *,
    count: int = 3,
    max_tokens: int = 128,
    observer: Observer | None = None,
) -> list[Comparison]:
    """Answer with the base model and with the trained one, greedily.

    Give ``prompt`` (any text) or ``domain`` (its first ``count`` held-out tasks, judged); with neither,
    one task of each domain of the run.
    """
    observer = observer or Silent()
    _, recipe = RunFolder.open(run)
    models = [locate_model(recipe.model, observer), trained_model(run)]
    if prompt is not None:
        task = Task(
            id="prompt", domain="", messages=(Message(role="user", content=prompt),), max_tokens=max_tokens
        )
        work: list[tuple[Task, Domain | None, int]] = [(task, None, 0)]
    else:
        names = [domain] if domain else list(recipe.domains)
        opened = [open_domain(name, recipe.domain_paths) for name in names]
        for each_domain in opened:
            each_domain.make_ready(observer.note)
        each = count if domain else 1
        work = [(d.problem("heldout", i).task, d, i) for d in opened for i in range(each)]
    before, after = (asyncio.run(_answers(model, work)) for model in models)
    prompts = [task.messages[-1].content for task, _, _ in work]
    return [Comparison(p, b, a) for p, b, a in zip(prompts, before, after, strict=True)]


async def _answers(model: Path, work: Sequence[tuple[Task, Domain | None, int]]) -> list[Said]:
    async with open_sampler(model, engines=1) as sampler, asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(_answer(sampler, *item)) for item in work]
    return [task.result() for task in running]


async def _answer(sampler: Sampler, task: Task, domain: Domain | None, index: int) -> Said:
    greedy = Sampling(temperature=0.0)
    if domain is None:
        tokens = sampler.renderer.start(task.messages)
        completion = await sampler.engine.generate(
            tokens, Sampling(temperature=0.0, max_tokens=task.max_tokens), timeout_s=300
        )
        return Said(sampler.renderer.text([int(t) for t in completion.tokens]))
    plan = GroupPlan(f"try-{index}", domain, domain.problem("heldout", index), 1, greedy, 0)
    judged = (await sampler.runner.run(plan)).members[0]
    segment = judged.trace.segments[-1]
    prompt_tokens = int(segment.turns[0]) if len(segment.turns) else len(segment)
    text = sampler.renderer.text([int(t) for t in segment.tokens[prompt_tokens:]])
    return Said(text, judged.reward)
