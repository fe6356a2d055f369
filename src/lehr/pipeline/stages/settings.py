"""What a distill stage is told, and parts of what others are. The other stages stand in ``pipeline.recipe``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from lehr.core.config import Config, Count
from lehr.engine.openai.settings import PREFIX
from lehr.train.base import TrainConfig


class LengthCurriculum(Config):
    """Short answers first: the limit on the tokens of one completion rises in a straight line. A task's own
    limit holds where it is lower.
    """

    start: Count
    """At the first step."""
    end: Count
    """From the step ``steps`` on."""
    steps: Count
    """Over how many steps it rises."""

    @model_validator(mode="after")
    def _rises(self) -> LengthCurriculum:
        if self.end < self.start:
            raise ValueError(
                f"the limit falls from {self.start} to {self.end}; expected an end of at least start"
            )
        return self

    def limit(self, step: int) -> int:
        """Return the most tokens of a completion of a group that is drawn for ``step`` (from 1 on)."""
        done = min(1.0, (step - 1) / max(1, self.steps - 1))
        return round(self.start + (self.end - self.start) * done)


class DistillStage(Config):
    """Learning from a teacher: from its answers, or from what it thinks of the student's own."""

    type: Literal["distill"] = "distill"
    name: str = "distill"
    teacher: str = Field(min_length=1)
    """``openai:NAME@BASE_URL`` for a model behind an API, else a model as ``lehr eval --model`` takes it."""
    api: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Settings of a teacher behind an API; the keys of ``lehr eval --api``."""
    method: Literal["off_policy", "on_policy"] = "off_policy"
    """``off_policy``: the teacher answers, the student imitates its text; the tokenizers may differ.
    ``on_policy``: the student answers, and each of its tokens is rewarded by how much likelier the teacher
    finds it; the teacher needs the student's vocabulary, and its weights."""
    temperature: float = Field(default=1.0, gt=0)
    """At which the teacher (off policy) or the student (on policy) answers."""
    tasks: Count = 240
    """Off policy: tasks asked, over all domains."""
    samples: Count = 1
    """Off policy: answers to each task."""
    verified: bool = True
    """Off policy: imitate only what solved its task."""
    keep_per_task: Count = 1
    """Off policy: different answers kept of one task, those of the highest reward."""
    epochs: Count = 2
    """Off policy: times that each kept answer is trained on."""
    batch_size: Count = 8
    """Off policy: answers in a step."""
    max_tokens: Count = 4096
    """Off policy: of one conversation; longer ones are left out and counted."""
    steps: Count = 20
    """On policy: steps of the student."""
    tasks_per_step: Count = 16
    """On policy: different tasks in a step."""
    group_size: int = Field(default=2, ge=2, lt=1 << 31)
    """On policy: answers to each of them."""
    staleness_bound: int = Field(default=0, ge=0, lt=1 << 31)
    """On policy: steps that may be sampled ahead of the weights; 0 is synchronous."""
    clip: float = Field(default=10.0, gt=0)
    """On policy: the largest reward of one token, in nats, either way."""
    checkpoint_every: Count = 4
    """On policy: steps between checkpoints."""
    train: TrainConfig = TrainConfig(learning_rate=1e-5, warmup_steps=2)

    @model_validator(mode="after")
    def _possible(self) -> DistillStage:
        behind_api = self.teacher.startswith(PREFIX)
        if behind_api and self.method == "on_policy":
            raise ValueError(
                f"{self.teacher} is behind an API, which does not tell how likely it finds given tokens; "
                "on_policy needs a teacher in a local folder"
            )
        if self.api and not behind_api:
            raise ValueError(f"api holds settings of a model behind an API, and {self.teacher!r} is none")
        return self
