"""What the stages that learn from preferences are told, and how RL uses a reward model and a critic."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from lehr.core.config import Config, Count
from lehr.core.reward import Credit
from lehr.train.base import TrainConfig


class PairSource(Config):
    """Where pairs of answers come from: a file, or attempts at tasks of which verifiers say which is better."""

    name: str
    data: str = ""
    """A file of JSON lines, each with ``prompt``, ``chosen`` and ``rejected``; a text or chat messages. Without
    one, pairs are made of attempts."""
    max_tokens: Count = 4096
    """The most tokens of one side of a pair of the file, at most the model's context; more is an error."""
    tasks: Count = 240
    """Without a file: tasks attempted, over all domains."""
    samples: int = Field(default=4, ge=2, lt=1 << 31)
    """Without a file: attempts at each."""
    temperature: float = Field(default=1.0, gt=0)
    """Without a file: at which they are sampled."""
    credit: Credit = "passed"
    """Without a file: ``passed`` prefers an attempt that solved its task to one that did not; ``value`` prefers
    any higher reward, those that differ most first."""
    pairs_per_task: Count = 2
    """Without a file: the most pairs of one task, so that no task crowds out the others."""
    epochs: Count = 1
    """Times that each pair is trained on."""
    batch_size: Count = 16
    """Pairs in a step."""
    train: TrainConfig = TrainConfig()


class PreferStage(PairSource):
    """Learning from pairs of answers, without a reward model: DPO or IPO, by ``train.preference_loss``."""

    type: Literal["prefer"] = "prefer"
    name: str = "prefer"
    train: TrainConfig = TrainConfig(learning_rate=5e-6, warmup_steps=2)


class RewardModelStage(PairSource):
    """Trains a model that scores answers, from the policy so far. The policy itself goes on as it was."""

    type: Literal["reward_model"] = "reward_model"
    name: str = "reward_model"
    heldout_share: float = Field(default=0.1, ge=0, le=0.5)
    """Share of the prompts whose pairs are held out, to measure how often the preferred answer gets the higher
    score."""
    train: TrainConfig = TrainConfig(learning_rate=1e-5, warmup_steps=2)


class RewardFrom(Config):
    """A reward model in RL: ``(1 - weight) * verified + weight * score``."""

    stage: str = ""
    """An earlier ``reward_model`` stage of the recipe."""
    path: str = ""
    """A folder with a reward model, as that stage or transformers writes it."""
    weight: float = Field(default=1.0, gt=0, le=1)
    """1 takes the score alone."""

    @model_validator(mode="after")
    def _one(self) -> RewardFrom:
        if bool(self.stage) == bool(self.path):
            raise ValueError("reward_model needs either stage or path")
        return self


class CriticConfig(Config):
    """The critic of ``advantage = "gae"``: a value head on a decoder of its own."""

    start: Literal["policy", "reward_model"] = "policy"
    """Whose weights it begins with."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """0 trusts the critic alone, 1 what came out alone."""
    whiten: bool = True
    """Advantages of a batch get mean 0 and spread 1."""
    kl: float = Field(default=0.0, ge=0)
    """What a nat of divergence from the stage's first weights costs at each token, as part of the reward."""
    passes: Count = 1
    """The critic's steps on each batch."""
    train: TrainConfig = TrainConfig(learning_rate=2e-5, warmup_steps=2, value_clip=0.2)
