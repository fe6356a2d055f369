"""The trainer protocol."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field, model_validator

from lehr.core.batch import Batch, Manifest, StepResult
from lehr.core.config import Config, Count, Dtype
from lehr.core.trace import Version

PolicyLossName = Literal["dppo_tv", "tis", "gspo", "none"]
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
    """Steps in which a schedule other than ``constant`` comes to its end, warm-up included."""
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
    """How a policy gradient corrects for tokens that older weights sampled: ``dppo_tv``, ``tis``, ``gspo`` or
    ``none``."""
    tis_cap: float = Field(default=2.0, gt=0)
    """Upper bound of the importance ratio under ``tis``."""
    mask_delta: float = Field(default=0.2, gt=0)
    """Probability difference beyond which ``dppo_tv`` drops a token that moves further away."""
    log_ratio_penalty: float = Field(default=1e-3, ge=0)
    """Weight of the squared log ratio under ``dppo_tv``."""
    gspo_low: float = Field(default=3e-4, gt=0, lt=1)
    """How far a sequence's ratio may fall below 1 under ``gspo``."""
    gspo_high: float = Field(default=4e-4, gt=0)
    """How far a sequence's ratio may rise above 1 under ``gspo``."""
    mean_over: Literal["token", "sequence"] = "token"
    """What a batch's loss is the mean of: its tokens, or its samples' own means (short ones then count as
    much)."""
    train_without_variance: bool = False
    """Also take in groups whose advantages are all zero (they then feel the log-ratio penalty)."""

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> TrainConfig:
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule {self.schedule!r} needs total_steps above warmup_steps ({self.warmup_steps}), "
                f"not {self.total_steps}"
            )
        if self.schedule == "wsd" and not 0 < self.decay_steps <= self.total_steps - self.warmup_steps:
            raise ValueError(
                f"schedule 'wsd' needs decay_steps from 1 to total_steps - warmup_steps "
                f"({self.total_steps - self.warmup_steps}), not {self.decay_steps}"
            )
        return self


class Trainer(Protocol):
    """Owns the master weights and the optimiser. One gang; world size 1 locally."""

    async def step(self, batch: Batch) -> StepResult:
        """Take exactly one optimiser step. A batch without loss tokens changes nothing.

        Raises ``Diverged`` when loss or gradient is not finite; weights are then unchanged.
        """
        ...

    async def publish(self, version: Version) -> Manifest:
        """Write the current weights for engines, complete and immutable, and return where they are."""
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
