"""The task source of ``terminal/files``."""

from __future__ import annotations

import random
from collections.abc import Callable

from lehr.core.task import Gold, Problem, Split
from lehr.domains.base import DomainCard
from lehr.domains.card import task_of
from lehr.domains.splitting import draw_for, stream
from lehr.domains.terminal.files import jobs

SYSTEM = "Answer with one sh block, or DONE."
JOINTS: dict[Split, tuple[str, ...]] = {
    "train": (", then ", "; then ", ". Next, ", ", and "),
    "validation": ("; afterwards ",),
    "heldout": (", and then ", ". Then "),
}
LEVEL_SHARES = (88, 4, 8)

Chosen = tuple[Callable[[jobs.Scene], jobs.Job], ...]


class FileSource:
    """Draws one job, two in a row, or one that has to look first; plays it on a model of the folder."""

    def problem(self, card: DomainCard, split: Split, index: int) -> Problem:
        """Return one problem."""
        level = stream(card.id, split, index).choices((0, 1, 2), LEVEL_SHARES)[0]
        rng, chosen = draw_for(card.id, split, index, lambda rng: _draw(rng, level))
        scene = jobs.Scene(rng, split)
        done = [job(scene) for job in chosen]
        said = rng.choice(JOINTS[split]).join(job.text for job in done)
        listing = ", ".join(sorted(scene.start)) or "none"
        user = f"Files: {listing}. {said[0].upper()}{said[1:]}."
        task = task_of(card, split, index, system=SYSTEM, user=user, level=level, files=scene.start)
        turns = [f"```sh\n{block}\n```" for block in _blocks(done)]
        return Problem(task, Gold((*turns, "DONE"), {"start": scene.start, "want": dict(scene.files)}))


def _draw(rng: random.Random, level: int) -> tuple[str, Chosen]:
    if level == 0:
        return "", (rng.choice(jobs.SINGLE),)
    if level == 2:
        return "", (rng.choice(jobs.LOOKING),)
    pair = tuple(rng.sample(jobs.SINGLE, 2))
    return "+".join(job.__name__ for job in pair), pair


def _blocks(done: list[jobs.Job]) -> list[str]:
    if all(len(job.turns) == 1 for job in done):
        return ["\n".join(job.turns[0] for job in done)]
    return [turn for job in done for turn in job.turns]


SOURCE = FileSource()
