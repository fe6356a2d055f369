"""What a domain is to the rest of the system."""

from __future__ import annotations

from typing import Protocol

from pydantic import Field

from lehr.core.config import Config
from lehr.core.episode import Evidence, Observation, Turn
from lehr.core.task import Problem, Resources, RewardTerm, Split, Task
from lehr.sandbox.base import Boxes


class DomainCard(Config):
    """``domain.toml``, readable without loading any code."""

    id: str
    """Path-like name such as ``code/functions``."""
    title: str
    description: str = ""
    version: str = "1"
    capabilities: tuple[str, ...] = ()
    """What a task exercises, in words of the taxonomy (``code``, ``extraction``, ``tool-use`` ...)."""
    source: str = "generated"
    licence: str = "Apache-2.0"
    generator: str
    """Import path ``module:object`` of the task source; the object is a :class:`Source`."""
    options: dict[str, str | int | float | bool] = Field(default_factory=dict[str, str | int | float | bool])
    """Passed to the generator."""
    environment: str = "answer"
    """Name of a registered environment."""
    image: str = "host"
    """What boxes are made from; may be declared in ``images`` beside the file."""
    allow_hosts: tuple[str, ...] = ()
    """Hosts that its boxes may reach, the judges' too."""
    setup: tuple[str, ...] = ()
    """Named steps of the image, run in order before the first turn, on the task's files."""
    reward: tuple[RewardTerm, ...]
    reward_range: tuple[float, float] = (0.0, 1.0)
    pass_at: float = 0.999
    """A reward of at least this much counts as solved."""
    resources: Resources = Field(default_factory=lambda: Resources.model_validate({}))
    timeout_s: float = Field(default=30.0, gt=0)
    max_turns: int = Field(default=1, ge=1)
    max_tokens: int = Field(default=128, ge=1)
    splits: dict[Split, int] = Field(default_factory=lambda: {"train": 4096, "validation": 64, "heldout": 128})
    """Number of tasks per split. Splits never share a seed or a template."""
    levels: int = 1
    quota: int = 0
    """Boxes that the domain may hold at once; 0 is no limit of its own."""


class Source(Protocol):
    """Makes the problems of a domain. Deterministic: the same (split, index) is always the same problem."""

    def problem(self, card: DomainCard, split: Split, index: int) -> Problem:
        """Return one problem; ``index`` below ``card.splits[split]``."""
        ...


class Episode(Protocol):
    """One running attempt."""

    async def step(self, turn: Turn) -> Observation:
        """Take the model's turn. Raises only for faults of the environment itself."""
        ...

    async def close(self) -> Evidence:
        """End the episode, release its box, and return what the verifier may see. Idempotent."""
        ...


class Environment(Protocol):
    """Starts episodes."""

    async def open(self, task: Task, boxes: Boxes) -> Episode:
        """Prepare the surroundings of ``task`` (a leased box with its files, if it needs one)."""
        ...
