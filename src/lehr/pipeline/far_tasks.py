"""Tasks from the far end of the train split: for stages that sample answers to imitate, and not for RL
first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lehr.domains.catalogue import Domain
from lehr.pipeline.recipe import DistillStage, RejectStage, Stage
from lehr.pipeline.stages.preferences import PairSource


@dataclass(frozen=True, slots=True)
class FarTask:
    """A task by its domain and index in the train split. position: counted over all such stages of the
    recipe.
    """

    position: int
    domain: Domain
    index: int


def far_tasks(domains: Mapping[str, Domain], stages: Sequence[Stage], name: str, count: int) -> list[FarTask]:
    """Return ``count`` tasks for the stage ``name``, evenly over the domains, none of which an earlier stage of
    this kind takes; fewer where a domain has no more.
    """
    taken = 0
    for stage in stages:
        if stage.name == name:
            break
        if (
            isinstance(stage, RejectStage)
            or (isinstance(stage, PairSource) and not stage.data)
            or (isinstance(stage, DistillStage) and stage.method == "off_policy")
        ):
            taken += stage.tasks
    names = list(domains)
    found: list[FarTask] = []
    for position in range(taken, taken + count):
        domain = domains[names[position % len(names)]]
        index = domain.card.splits.get("train", 0) - 1 - position // len(names)
        if index >= 0:
            found.append(FarTask(position, domain, index))
    return found
