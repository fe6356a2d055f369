"""The trainer protocol."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from lehr.core.batch import Batch, Manifest, Sample, StepResult
from lehr.core.config import Config, Count, Dtype
from lehr.core.errors import ConfigError
from lehr.core.trace import Version

PolicyLossName = Literal["dppo_tv", "ppo_clip", "decoupled_ppo", "gspo", "cispo", "tis", "none"]
Positive = Annotated[float, Field(gt=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]


Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LoraConfig(Config):
    """An adapter of low rank that is trained in place of the weights."""

    rank: Count = 16
    alpha: float = Field(default=32.0, gt=0)
    """The adapter's part is multiplied by ``alpha / rank``."""
    targets: tuple[Projection, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Projections that get an adapter, in every layer."""
    seed: int = 0
    """Of the random start of A; B starts at zero, so that the first step begins at the model itself."""

    @model_validator(mode="after")
    def _each_target_once(self) -> LoraConfig:
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"lora.targets names a projection twice: {', '.join(self.targets)}")
        return self


class TrainConfig(Config):
    """How gradient steps are taken."""

    learning_rate: float = Field(default=2e-5, gt=0)
    warmup_steps: int = Field(default=0, ge=0, lt=1 << 31)
    """Steps over which the learning rate rises linearly to its full value."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """How the learning rate goes on after the warm-up; ``wsd`` is constant until the last ``decay_steps``."""
    total_steps: int = Field(default=0, ge=0, lt=1 << 31)
    """Steps in which a schedule other than ``constant`` comes to its end, warm-up included; 0 is as many as the
    stage takes."""
    decay_steps: int = Field(default=0, ge=0, lt=1 << 31)
    """Last steps of ``wsd``, over which the learning rate falls linearly."""
    final_rate: float = Field(default=0.0, ge=0, le=1)
    """Where a schedule ends, as a fraction of ``learning_rate``."""
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    max_grad_norm: float = Field(default=1.0, gt=0)
    tokens_per_microbatch: int = Field(default=4096, ge=64, lt=1 << 31)
    """Packed tokens (shared prefixes counted once) per forward and backward."""
    lora: LoraConfig | None = None
    """Train an adapter of low rank; without it all weights are trained."""
    recompute_activations: bool = False
    """Keep only the input of each layer for the backward pass and compute the rest again: about a third more
    time, several times less memory per token. The gradient is the same."""
    dtype: Dtype = "auto"
    """Compute dtype; ``auto`` is bfloat16 where the processor has matrix instructions for it, else float32.
    Master weights and optimiser state are float32 always."""
    policy_loss: PolicyLossName = "dppo_tv"
    """How a policy gradient corrects for tokens that older weights sampled: ``dppo_tv``, ``ppo_clip``,
    ``decoupled_ppo``, ``gspo``, ``cispo``, ``tis`` or ``none``."""
    tis_cap: float = Field(default=2.0, gt=0)
    """Upper bound of the importance ratio under ``tis``."""
    mask_delta: float = Field(default=0.2, gt=0)
    """Probability difference beyond which ``dppo_tv`` drops a token that moves further away."""
    log_ratio_penalty: float = Field(default=1e-3, ge=0)
    """Weight of the squared log ratio under ``dppo_tv``."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """How far a token's ratio may fall below 1 under ``ppo_clip`` and ``decoupled_ppo``."""
    clip_high: float = Field(default=0.28, gt=0)
    """How far a token's ratio may rise above 1 under ``ppo_clip`` and ``decoupled_ppo``."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """Ratio beyond which a token of negative advantage is not pushed down further, under the same two; none is
    off."""
    cispo_cap: float = Field(default=5.0, gt=0)
    """Upper bound of the importance ratio under ``cispo``."""
    behaviour_cap: float = Field(default=5.0, gt=0)
    """Upper bound of the weight for samples of older versions under ``decoupled_ppo``."""
    gspo_low: float = Field(default=3e-4, gt=0, lt=1)
    """How far a sequence's ratio may fall below 1 under ``gspo``."""
    gspo_high: float = Field(default=4e-4, gt=0)
    """How far a sequence's ratio may rise above 1 under ``gspo``."""
    geometric_mask: tuple[Positive, Positive] | None = None
    """Bounds, such as [0.99, 1.01], of the geometric mean of a sample's ratios, outside of which it is left out
    of the policy loss."""
    off_policy_delta: float | None = Field(default=None, gt=0)
    """Leave samples of negative advantage out of the policy loss whose tokens have become less likely by more
    than this on average, in nats."""
    loss_kl: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the reference model (k2) in the loss."""
    mean_over: Literal["token", "sequence"] = "token"
    """What a batch's loss is the mean of: its tokens, or its samples' own means (short ones then count as
    much)."""
    preference_loss: Literal["dpo", "ipo"] = "dpo"
    """How a pair of answers teaches: ``dpo`` or ``ipo``."""
    beta: float = Field(default=0.1, gt=0)
    """How strongly ``dpo`` and ``ipo`` hold on to the reference: more is closer."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs that ``dpo`` takes to be labelled wrongly."""
    value_clip: float | None = Field(default=None, gt=0)
    """How far a step may move a critic's value of a token; no bound where it is left out."""
    train_without_variance: bool = False
    """Also take in groups whose advantages are all zero (they then feel the log-ratio penalty)."""

    @model_validator(mode="after")
    def _schedule_fits(self) -> TrainConfig:
        if self.schedule == "wsd" and not self.decay_steps:
            raise ValueError("schedule 'wsd' needs decay_steps, the last steps over which the rate falls")
        if self.total_steps:
            _require_room(self, self.total_steps)
        return self

    def within(self, steps: int) -> TrainConfig:
        """Return these settings with a schedule that ends after ``steps``, where it was not told when. Raises
        :class:`ConfigError` where warm-up and decay take more.
        """
        if self.schedule == "constant" or self.total_steps:
            return self
        _require_room(self, steps)
        return self.model_copy(update={"total_steps": steps})


def _require_room(config: TrainConfig, steps: int) -> None:
    if config.schedule == "constant":
        return
    decay = config.decay_steps if config.schedule == "wsd" else 1
    if config.warmup_steps + decay > steps:
        raise ConfigError(
            f"schedule {config.schedule!r} has {config.warmup_steps} warmup_steps and {decay} decay_steps",
            expected=f"at most {steps} together, which is all the steps there are",
        )


Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["domain", "batch", "group", "none"]
Overlong = Literal["train", "mask", "penalise"]


class AdvantageConfig(Config):
    """How rewards become advantages."""

    baseline: Baseline = "mean"
    """What a reward is compared with: the mean of its group, or that of the group's other members."""
    scale: Scale = "domain"
    """What advantages are divided by: the running spread of their domain, the spread over the batch, that of
    their group (GRPO as published; it weighs tasks up that are nearly always or nearly never solved), or
    nothing."""
    normalise_parts: bool = False
    """Centre each part of the reward and divide it by its own spread over the group before they are summed, so
    that a part with large units does not drown the others. ``credit`` then plays no role."""
    part_weights: dict[str, float] = Field(default_factory=dict)
    """Weights of that sum, by part; 1 where a part is not named."""
    turns: Literal["off", "return"] = "off"
    """``return``: where the environment gives credit for single turns, a turn's tokens are credited with the
    discounted return from that turn on, relative to the group's other attempts at the same turn."""
    turn_discount: float = Field(default=1.0, ge=0, le=1)
    """What a turn later is worth less."""
    overlong: Overlong = "train"
    """Attempts that the token limit cut off, or of more than ``overlong_tokens`` tokens: ``train`` treats them
    as any other; ``mask`` keeps them in the baseline and does not train on them; ``penalise`` lowers the reward
    over the last ``overlong_margin`` tokens before the limit, by up to ``overlong_penalty``."""
    overlong_tokens: Count | None = None
    """Own tokens of an attempt from which it is overlong."""
    overlong_margin: Count = 256
    overlong_penalty: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _fits(self) -> AdvantageConfig:
        if self.part_weights and not self.normalise_parts:
            raise ValueError("part_weights are of the sum of normalised parts: set normalise_parts = true")
        if self.normalise_parts and self.turns != "off":
            raise ValueError(
                "normalise_parts credits whole attempts and turns = 'return' single turns; choose one"
            )
        if self.turn_discount != 1 and self.turns == "off":
            raise ValueError("turn_discount is for turns = 'return'")
        if self.overlong == "penalise" and self.overlong_tokens is None:
            raise ValueError("overlong = 'penalise' needs overlong_tokens, the limit that is penalised")
        return self


class AlarmConfig(Config):
    """When the numbers of a step are alarming. Alarms are noted and recorded; those of a run that has diverged
    (a value that is not finite, a loss spike, an entropy collapse) end the stage at its last good
    checkpoint.
    """

    stop: bool = True
    """Whether a run that has diverged is stopped; a value that is not finite stops it always."""
    window: Count = 20
    """Steps whose median is what is usual."""
    loss_spike: float = Field(default=10.0, gt=1)
    """Times the usual size from which a loss has spiked, if it is above ``loss_floor`` as well."""
    loss_floor: float = Field(default=3.0, gt=0)
    """Losses per token up to this size are no spike."""
    entropy_fraction: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of the first step's entropy below which it has collapsed, if below ``entropy_floor`` as well."""
    entropy_floor: float = Field(default=0.05, ge=0)
    """Nats per token; entropies above are no collapse."""
    entropy_steps: Count = 3
    """Steps in a row of collapsed entropy after which the run has diverged."""
    grad_norm: float = Field(default=10.0, gt=1)
    """Times the usual gradient norm."""
    mismatch_kl: float = Field(default=0.05, gt=0)
    """Mean k3 of trainer and sampler."""
    effective_samples: float = Field(default=0.5, gt=0, lt=1)
    """Effective sample size, as a fraction of the tokens, below which too few carry the step."""
    clipped: float = Field(default=0.3, gt=0, le=1)
    """Fraction of tokens on which the bound of the loss acts."""
    masked: float = Field(default=0.5, gt=0, le=1)
    """Fraction of tokens in masked sequences."""
    reference_kl: float | None = Field(default=None, gt=0)
    """Mean k3 to the reference; none is off."""


class Trainer(Protocol):
    """Owns the master weights and the optimiser. One gang; world size 1 locally."""

    async def step(self, batch: Batch) -> StepResult:
        """Take exactly one optimiser step. A batch without loss tokens changes nothing.

        Raises ``Diverged`` when loss or gradient is not finite; weights are then unchanged.
        """
        ...

    async def score(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """Return per sample the log-probability of each own token at its temperature, in order; under a scalar
        head, the score of all that stands before the token.
        """
        ...

    async def evaluate(self, batch: Batch) -> StepResult:
        """Return the mean cross-entropy (``loss``) of the batch's own tokens; changes nothing."""
        ...

    async def publish(self, version: Version) -> Manifest:
        """Write the current weights for engines, complete and immutable, and return where they are.

        Raises ``Diverged``, and writes nothing, when the weights give values that are not finite.
        """
        ...

    async def save(self, path: Path, *, resumable: bool = True) -> None:
        """Write a Hugging Face folder atomically; with ``resumable``, the optimiser state beside it."""
        ...

    async def load(self, path: Path, *, optimizer: bool = True) -> None:
        """Go on from a folder that :meth:`save` wrote."""
        ...

    async def reset(self, config: TrainConfig) -> None:
        """Start a new stage on the same weights: fresh optimiser, new configuration."""
        ...
