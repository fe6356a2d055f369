"""The model before and after a run, side by side on one prompt or on a domain's held-out tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

from lehr.core.reward import Reward
from lehr.core.task import Message, Task
from lehr.core.trace import Sampling, Segment
from lehr.domains.catalogue import Domain, open_domain
from lehr.model.base import Renderer
from lehr.pipeline.folder import RunFolder
from lehr.pipeline.models import locate_model, trained_model
from lehr.pipeline.observer import Observer, Silent
from lehr.pipeline.sampler import Sampler, open_sampler
from lehr.rollout.group import GroupPlan

Speaker = Literal["assistant", "tool"]


@dataclass(frozen=True, slots=True)
class Said:
    """What one model answered; ``reward`` is None for a free prompt.

    turns: who said what, where the environment answered in between; else one turn of the assistant.
    cut: whether the token limit ended it.
    """

    text: str
    reward: Reward | None = None
    turns: tuple[tuple[Speaker, str], ...] = ()
    cut: bool = False


@dataclass(frozen=True, slots=True)
class Comparison:
    """One prompt and both answers."""

    prompt: str
    before: Said
    after: Said


@dataclass(frozen=True, slots=True)
class Question:
    """What both models are asked: tasks with their domains and indices. ``base`` may have to be fetched."""

    base: str
    trained: Path
    work: Sequence[tuple[Task, Domain | None, int]]


def prepare(
    run: Path,
    prompt: str | None = None,
    domain: str | None = None,
    *,
    like: str | None = None,
    count: int = 3,
    max_tokens: int = 128,
) -> Question:
    """Return what to ask: ``prompt`` (any text), or the first ``count`` held-out tasks of ``domain``, judged;
    with neither, one task of each domain of the run.

    like: the domain whose system message stands before ``prompt``.

    Starts nothing. Raises ``ConfigError`` for a folder that is no run or has no trained checkpoint yet, and
    ``UnknownName`` for a domain that does not exist.
    """
    _, recipe = RunFolder.open(run)
    trained = trained_model(run)
    if prompt is not None:
        system: tuple[Message, ...] = ()
        if like is not None:
            shown = open_domain(like, recipe.domain_paths).problem("train", 0).task
            system = tuple(message for message in shown.messages if message.role == "system")
        messages = (*system, Message(role="user", content=prompt))
        task = Task(id="prompt", domain="", messages=messages, max_tokens=max_tokens)
        return Question(recipe.model, trained, [(task, None, 0)])
    names = [domain] if domain else list(recipe.domains)
    opened = [open_domain(name, recipe.domain_paths) for name in names]
    each = count if domain else 1
    sizes = {d.card.id: min(each, d.card.splits.get("heldout", 0)) for d in opened}
    work = [(d.problem("heldout", i).task, d, i) for d in opened for i in range(sizes[d.card.id])]
    return Question(recipe.model, trained, work)


def compare(question: Question, observer: Observer | None = None) -> list[Comparison]:
    """Answer with the base model and with the trained one, greedily."""
    observer = observer or Silent()
    for domain in {domain.card.id: domain for _, domain, _ in question.work if domain}.values():
        domain.make_ready(observer.note)
    models = [locate_model(question.base, observer), question.trained]
    before, after = (asyncio.run(_answers(model, question.work)) for model in models)
    prompts = [task.messages[-1].content for task, _, _ in question.work]
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
        text = sampler.renderer.text([int(t) for t in completion.tokens])
        return Said(text, cut=completion.stop == "length")
    plan = GroupPlan(f"try-{index}", domain, domain.problem("heldout", index), 1, greedy, 0)
    judged = (await sampler.runner.run(plan)).members[0]
    if not judged.trace.segments:
        return Said("", judged.reward)
    turns = tuple(said for s in judged.trace.segments for said in turns_of(s, sampler.renderer))
    text = "\n".join(said for _, said in turns)
    return Said(text, judged.reward, turns, cut=judged.trace.stop == "length")


def turns_of(segment: Segment, renderer: Renderer) -> Iterator[tuple[Speaker, str]]:
    """Yield who said what after the prompt."""
    start = int(segment.turns[0]) if len(segment.turns) else len(segment)
    pairs = zip(segment.own[start:].tolist(), segment.tokens[start:].tolist(), strict=True)
    for own, run in groupby(pairs, key=lambda pair: pair[0]):
        text = renderer.text([token for _, token in run]).strip()
        if text:
            yield ("assistant" if own else "tool"), text
