"""A recipe: which model, which domains, which stages. Frozen, digested, saved with every run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lehr.core.config import Config, Count, load, resolve
from lehr.core.errors import ConfigError
from lehr.core.reward import Credit
from lehr.engine.native.settings import NativeConfig
from lehr.pipeline.choosing import Keep
from lehr.pipeline.conversations import TooLong
from lehr.pipeline.stages.preferences import CriticConfig, PreferStage, RewardFrom, RewardModelStage
from lehr.pipeline.stages.settings import DistillStage, LengthCurriculum
from lehr.rollout.compress import CompressionConfig
from lehr.rollout.replay import ReplayConfig
from lehr.train.base import AdvantageConfig, AlarmConfig, TrainConfig


class EvaluationConfig(Config):
    """How stages are measured."""

    count: Count = 100
    """Held-out tasks per domain."""
    base_count: Count = 20
    """Held-out tasks per domain for the base model, at most ``count``. It is no side of a comparison, and
    answers at full length, so that each of its tasks costs several of a trained model's."""
    concurrency: Count = 80
    """Episodes at once."""


class SandboxConfig(Config):
    """The boxes."""

    backend: str = "bwrap"
    boxes: Count = 96
    """Boxes alive at once. An episode with a shell holds one from its first turn to its last, so there
    should be as many as episodes, and some for the judges."""
    warm: int = Field(default=4, ge=0, lt=1 << 31)
    """Boxes kept ready per specification."""
    quotas: dict[str, Count] = Field(default_factory=dict)
    """The most boxes that one domain may hold, for its episodes and its judges together, by domain."""


class SftStage(Config):
    """Supervised fine-tuning on demonstrations made from gold answers of the train split, on conversations in a
    file, or on both.
    """

    type: Literal["sft"] = "sft"
    name: str = "sft"
    demonstrations: int | None = Field(default=None, ge=0, lt=1 << 31)
    """Over all domains, divided evenly. The default is 36, and none where there is ``data``."""
    data: str = ""
    """A JSONL file of conversations; see ``lehr.pipeline.conversations``."""
    max_tokens: Count = 2048
    """Of one conversation of ``data``, prompt and answers together."""
    too_long: TooLong = "refuse"
    """What becomes of a longer one: ``refuse`` leaves it out, ``cut`` keeps its beginning. Both are counted."""
    heldout_share: float = Field(default=0.05, ge=0, lt=1)
    """Of the conversations of ``data``: never trained on; their loss is told after each epoch."""
    max_epochs: Count = 6
    batch_size: Count = 8
    best_by: Literal["rate", "loss"] | None = None
    """Which epoch's weights are kept: of the highest validation rate, or of the lowest held-out loss. The
    default is the loss where there is ``data``."""
    patience: Count = 1
    """Epochs without a better one after which the stage ends with the best weights."""
    validation_count: Count = 12
    """Validation tasks per domain, measured after each epoch where the rate decides."""
    train: TrainConfig = TrainConfig(warmup_steps=2)

    @model_validator(mode="after")
    def _consistent(self) -> SftStage:
        if not self.data and (self.demonstrations == 0 or self.best_by == "loss"):
            raise ValueError("without data, an sft stage needs demonstrations and best_by='rate'")
        if self.judged_by == "loss" and self.heldout_share == 0:
            raise ValueError("best_by='loss' needs a heldout_share above 0; or set best_by='rate'")
        return self

    @property
    def from_gold(self) -> int:
        """How many demonstrations are made from gold answers."""
        return (0 if self.data else 36) if self.demonstrations is None else self.demonstrations

    @property
    def judged_by(self) -> Literal["rate", "loss"]:
        """Which epoch's weights are kept."""
        return self.best_by or ("loss" if self.data else "rate")


class RejectStage(Config):
    """Rejection sampling: the model's own verified answers become demonstrations."""

    type: Literal["reject"] = "reject"
    name: str = "reject"
    tasks: Count = 240
    """Tasks sampled, over all domains."""
    samples: Count = 4
    """Attempts per task."""
    temperature: float = Field(default=0.8, gt=0)
    """Below 1, more tasks are solved at least once, by answers that differ less."""
    epochs: Count = 2
    batch_size: Count = 8
    keep: Keep = "passing"
    """``passing``: what solved its task. ``best``: of each task also what was not solved by any attempt, where
    one did better than another (best of N by reward)."""
    keep_per_task: Count = 2
    """Different answers kept of one task, those of the highest reward first, so that easy tasks do not crowd
    out hard ones."""
    min_value: float | None = None
    """The least reward of an answer that is kept."""
    near_duplicate: float = Field(default=1.0, gt=0, le=1)
    """Likeness of two answers to one task from which on they count as one: the share of runs of five tokens
    that they have in common. 1: only where they are equal."""
    train: TrainConfig = TrainConfig(warmup_steps=2)


class RlStage(Config):
    """Asynchronous reinforcement learning from verified rewards."""

    type: Literal["rl"] = "rl"
    name: str = "rl"
    steps: Count = 6
    groups_per_batch: Count = 16
    """Different tasks per step. More tasks of fewer attempts carry over to new tasks better than fewer tasks
    of more attempts at the same cost."""
    group_size: int = Field(default=4, ge=2, lt=1 << 31)
    credit: Credit = "value"
    """``value``: partial credit counts, which teaches tasks that are never solved whole, and also whatever
    half-solves the others. ``passed``: only solved tasks are rewarded."""
    negative_weight: float = Field(default=1.0, ge=0, le=1)
    """What advantages below zero are multiplied by. At 0 a step learns from what did better than its group and
    from nothing else: it cannot tear down what it never rebuilds, bears a higher learning rate, and costs
    half; but nothing keeps entropy up, so that it suits short runs."""
    group: AdvantageConfig = AdvantageConfig()
    """How rewards become advantages, with ``advantage = "group"``."""
    reference: bool = False
    """Keep the weights that the stage starts from as a reference model and measure the divergence from it: one
    more copy of the weights in memory and one more forward pass over each batch. ``reward_kl`` and
    ``train.loss_kl`` need it and switch it on."""
    reward_kl: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the reference (k1, summed over an attempt) that is taken off its reward."""
    alarms: AlarmConfig = AlarmConfig()
    """When the numbers of a step are alarming, and whether a run that has diverged is stopped."""
    passes: Count = 1
    """Optimiser steps on each batch. More of them get more out of what was sampled; the correction for
    samples that are off the policy bounds what the later ones can do."""
    staleness_bound: int = Field(default=1, ge=0, lt=1 << 31)
    """Batches that may be started ahead of the weights; 0 is synchronous."""
    temperature: float = Field(default=1.0, gt=0)
    length: LengthCurriculum | None = None
    """A limit on sampled tokens that rises with the step; none by default."""
    replay: ReplayConfig | None = None
    """Rare successes of earlier steps are trained on again; off by default."""
    max_sample_tokens: Count | None = None
    """A trace whose tokens with loss span more is trained on in several parts, split between turns; each part
    is computed with all that stood before it. It counts once in its group all the same."""
    target_pass_rate: float = Field(default=0.5, gt=0, lt=1)
    """A domain below it gains weight, one above it loses weight, down to a floor."""
    refuse_batches: Count = 4
    """Batches' worth of groups in a row that teach nothing, after which a step is given up."""
    starved_steps: Count = 2
    """Given-up steps in a row after which the stage ends."""
    checkpoint_every: Count = 4
    """Steps between checkpoints."""
    time_limit_s: float | None = Field(default=None, gt=0)
    """Start no further step after this many seconds of the stage."""
    reward_model: RewardFrom | None = None
    """A reward model whose score is, or is part of, the reward. What a verifier could not judge stays so."""
    advantage: Literal["group", "gae"] = "group"
    """``group``: what an attempt's reward is above its group's mean. ``gae``: PPO; what each token turned out
    better than the critic expected."""
    critic: CriticConfig = CriticConfig()
    """With ``advantage = "gae"``."""
    train: TrainConfig = TrainConfig(learning_rate=1e-5, warmup_steps=2)

    @model_validator(mode="after")
    def _fits(self) -> RlStage:
        if self.reward_model is not None and self.credit != "value":
            raise ValueError("a reward_model's score is no part of credit='passed'; set credit='value'")
        self.train.within(self.steps * self.passes)
        self.critic.train.within(self.steps * self.critic.passes)
        if self.advantage == "gae" and self.negative_weight != 1:
            raise ValueError("negative_weight is for advantage='group'; leave it out with 'gae'")
        if self.advantage == "gae" and self.replay is not None:
            raise ValueError("replay is for advantage='group': a critic's word on an old trace is out of date")
        if self.critic.start == "reward_model" and self.reward_model is None:
            raise ValueError("critic.start='reward_model' needs a reward_model")
        if self.advantage == "gae" and self.needs_reference:
            raise ValueError(
                "reference, reward_kl and train.loss_kl are for advantage='group'; with 'gae' set critic.kl"
            )
        if self.replay is not None and (
            self.group.turns != "off" or self.group.scale not in ("domain", "none")
        ):
            raise ValueError("replay needs group.turns='off' and group.scale='domain' or 'none'")
        if self.advantage == "gae" and self.group != AdvantageConfig():
            raise ValueError("the table group is for advantage='group'; leave it out with 'gae'")
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is kept."""
        return self.reference or self.reward_kl > 0 or self.train.loss_kl > 0


class ControlStage(Config):
    """Goes on with SFT on the same demonstrations, from the same checkpoint, for as many seconds as other
    stages took: what the same compute buys without reinforcement learning.
    """

    type: Literal["control"] = "control"
    name: str = "sft_more"
    after: str = "sft"
    """The stage whose checkpoint and demonstrations are used."""
    match: tuple[str, ...] = ("reject", "rl")
    """The stages whose seconds are spent."""
    batch_size: Count = 16
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _ends_by_the_clock(self) -> ControlStage:
        if self.train.schedule != "constant" and not self.train.total_steps:
            raise ValueError("a control stage ends by the clock: set train.total_steps, or schedule='constant'")
        return self


Stage = Annotated[
    SftStage | RejectStage | DistillStage | PreferStage | RewardModelStage | RlStage | ControlStage,
    Field(discriminator="type"),
]


def is_measured(stage: Stage) -> bool:
    """Return whether the policy is measured after the stage. The measurement is then what ends it."""
    return stage.type not in ("reject", "reward_model")


def closing_name(stage: Stage) -> str:
    """Return the name of what ends the stage in the record."""
    return f"measure {stage.name}" if is_measured(stage) else stage.name


class Recipe(Config):
    """A whole run."""

    model: str = "smollm2-135m"
    """A name known to ``lehr models fetch``, ``tiny``, or a Hugging Face folder."""
    domains: tuple[str, ...] = ("code/functions", "documents/invoices", "terminal/files")
    domain_paths: tuple[str, ...] = ()
    """Folders searched for domains besides the built-in ones and ``./domains``."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    stages: tuple[Stage, ...] = Field(min_length=1)
    evaluation: EvaluationConfig = EvaluationConfig()
    engine: NativeConfig = NativeConfig()
    engines: int | None = Field(default=None, ge=1, le=256)
    """Sampling processes; the default is one per core, at most four. They share the cores and the
    ``cache_tokens`` of ``engine`` evenly, and each runs up to its ``max_running``."""
    sandbox: SandboxConfig = SandboxConfig()
    compression: CompressionConfig | None = None
    """Episodes whose conversation outgrows the context are compressed, in training and measuring alike; without
    it they end there."""

    @model_validator(mode="after")
    def _names(self) -> Recipe:
        names = [stage.name for stage in self.stages]
        for name in names:
            if not re.fullmatch(r"[^./\x00-\x1f][^/\x00-\x1f]{0,63}", name):
                raise ValueError(
                    f"{name!r:.80} cannot be the name of a stage and its folder: expected 1 to 64 "
                    "characters without '/', the first not '.'"
                )
        twice = sorted({name for name in names if names.count(name) > 1} | ({"base"} & set(names)))
        if twice:
            raise ValueError(f"stage names must be unique and not 'base'; rename {', '.join(twice)}")
        seen: set[str] = set()
        scorers: set[str] = set()
        for stage in self.stages:
            if isinstance(stage, RewardModelStage):
                scorers.add(stage.name)
            used = stage.reward_model.stage if isinstance(stage, RlStage) and stage.reward_model else ""
            if used and used not in scorers:
                raise ValueError(f"stage {stage.name!r} needs a reward_model stage named {used!r} before it")
            if isinstance(stage, ControlStage):
                missing = [name for name in (stage.after, *stage.match) if name not in seen]
                if missing:
                    raise ValueError(f"stage {stage.name!r} needs {', '.join(missing)} before it")
            seen.add(stage.name)
        if self.engine.rope_scaling is not None:
            raise ValueError(
                "engine.rope_scaling changes the model that is sampled from and not the one that is trained; "
                "write the scaling into the model's config.json instead"
            )
        if not self.domains:
            raise ValueError("a recipe needs at least one domain")
        if twice := sorted({name for name in self.domains if self.domains.count(name) > 1}):
            raise ValueError(f"domains names {', '.join(twice)} more than once; keep one of each")
        if strange := sorted(set(self.sandbox.quotas) - set(self.domains)):
            known = ", ".join(self.domains)
            raise ValueError(
                f"sandbox.quotas names {', '.join(strange)}, which the recipe does not train: {known}"
            )
        return self


def quickstart_recipe(model: str = "smollm2-135m", *, control: bool = False, seed: int = 0) -> Recipe:
    """Return the recipe of ``lehr quickstart``: everything at a size that two cores finish in minutes."""
    if model == "tiny":
        sft = SftStage(
            demonstrations=48,
            max_epochs=10,
            patience=10,
            validation_count=2,
            train=TrainConfig(learning_rate=3e-3),
        )
        stages: list[SftStage | RejectStage | RlStage | ControlStage] = [
            sft,
            RejectStage(tasks=6, samples=2, train=TrainConfig(learning_rate=1e-3)),
            RlStage(steps=4, groups_per_batch=4, group_size=4, checkpoint_every=2, refuse_batches=3),
        ]
        evaluation = EvaluationConfig(count=8)
    else:
        rl = RlStage(
            steps=4,
            credit="passed",
            negative_weight=0.0,
            target_pass_rate=0.25,
            train=TrainConfig(learning_rate=2e-5, warmup_steps=2),
        )
        stages = [SftStage(), RejectStage(), rl]
        evaluation = EvaluationConfig()
    if control:
        stages.append(ControlStage())
    return Recipe(model=model, stages=tuple(stages), seed=seed, evaluation=evaluation)


NAMED: Mapping[str, Callable[[], Recipe]] = {
    "quickstart": quickstart_recipe,
    "control": partial(quickstart_recipe, control=True),
    "tiny": partial(quickstart_recipe, "tiny"),
}
"""Recipes that come with lehr, for ``lehr train NAME``."""


def load_recipe(name: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a TOML file, or the one that comes with lehr under this name, with overrides.

    Raises ``ConfigError`` that names the file and the key.
    """
    try:
        there = name.exists()
    except OSError:
        there = True  # reading it says what is wrong
    if not there and str(name) in NAMED:
        body = NAMED[str(name)]().model_dump(mode="json")
        return resolve(Recipe, body, overrides, where=f"recipe {name}")
    if not there:
        raise ConfigError(
            f"no such file: {name}",
            expected=f"a recipe in TOML, or one that comes with lehr: {', '.join(NAMED)}",
            hint="Check the path.",
        )
    return load(Recipe, name, overrides)
