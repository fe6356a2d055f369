"""The engine's settings, readable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from lehr.core.config import Config, Count, Dtype
from lehr.model.scaling import RopeScaling


class SparseConfig(Config):
    """Sparse attention: which keys a position sees. All of them while the context is short."""

    sinks: int = Field(default=64, ge=0, lt=1 << 20)
    """The first tokens, always seen; whole blocks."""
    window: int = Field(default=1024, ge=32, lt=1 << 24)
    """Tokens before each position that are always seen."""
    top_blocks: int = Field(default=32, ge=1, lt=1 << 16)
    """Blocks between the two that are seen: those that may matter most."""
    block: Literal[8, 16, 32, 64, 128] = 64
    """Tokens in a block."""

    @property
    def sink_blocks(self) -> int:
        """Blocks that hold the sinks."""
        return -(-self.sinks // self.block)

    @property
    def exact_tokens(self) -> int:
        """Leading positions that see everything before them."""
        return (self.sink_blocks + self.top_blocks + 1) * self.block + self.window - 1


WeightFormat = Literal["plain", "int8"]


class NativeConfig(Config):
    """How much the engine runs at once."""

    max_running: Count = 64
    """Requests that decode in one step."""
    token_budget: int = Field(default=1024, ge=16, lt=1 << 31)
    """Tokens per step; what decoding leaves of it goes to prompts. A large one fills the batch at once, a small
    one keeps decoding requests from waiting for the prompts of others."""
    cache_tokens: int = Field(default=32768, ge=16, lt=1 << 31)
    """Tokens whose keys and values the block pool can hold, for running requests and prefixes together."""
    draft_tokens: int = Field(default=0, ge=0, le=64)
    """Tokens drafted at most per request and step (speculative decoding); 0 is off. Changes how many steps a
    completion takes, never its distribution. Pays where text repeats itself and few requests run."""
    draft_model: str = ""
    """Name or folder of a smaller model with the same tokenizer that writes the drafts; without one, they are
    looked up in the text."""
    weights: WeightFormat = "plain"
    """``int8`` rounds the weights to one byte each, a scale per output: steps of up to 16 tokens take half
    the time, memory for weights rises by half, log-probabilities move a little."""
    kernels: bool = True
    """Use compiled kernels where there is a C++ compiler; without them the engine is about half as fast."""
    kv_dtype: Literal["auto", "int8"] = "auto"
    """How keys and values are kept: ``auto`` in the compute dtype; ``int8`` with a scale for each token and
    head, in half the memory of bfloat16. That moves log-probabilities (SmolLM2-135M: by 0.016 on average), so
    traces carry the policy ``quantized``."""
    tier_memory_bytes: int = Field(default=0, ge=0, lt=1 << 62)
    """Memory for keys and values that the block pool has no room for, compressed without loss; 0 is off."""
    tier_disk_bytes: int = Field(default=0, ge=0, lt=1 << 62)
    """Space on disk, in ``tier_folder``, for what ``tier_memory_bytes`` has no room for; 0 is off."""
    tier_folder: str = ""
    """Where the files go, readable by this user only and removed when the engine closes. Several engines may
    share it: each has a folder of its own in there, and as many bytes."""
    rope_scaling: RopeScaling | None = None
    """Position scaling in place of the one in the model's ``config.json``: ``{type = "yarn", factor = 4}`` lets
    a model take sequences four times as long as it was trained on. None keeps the model's own."""
    sparse: SparseConfig | None = None
    """Sparse attention, for contexts of tens of thousands of tokens and more. It changes the distribution:
    what is sampled carries the policy ``sparse``. None attends to everything."""
    dtype: Dtype = "auto"
    """Compute dtype: ``auto``, ``float32`` or ``bfloat16``."""
    batch_invariant: bool = False
    """Give a request the same bits whatever else runs: greedy tokens, tokens drawn with a seed, and all
    log-probabilities depend neither on the batch, nor on how a prompt is cut into chunks, nor on caching,
    preemption and drafts. Slower; needs ``kernels``."""

    @model_validator(mode="after")
    def _goes_together(self) -> NativeConfig:
        if self.draft_model and not self.draft_tokens:
            raise ValueError("draft_model needs draft_tokens, the number drafted at most per step, such as 4")
        if self.sparse is not None and self.kv_dtype == "int8":
            raise ValueError(
                "sparse attention needs keys in the compute dtype: kv_dtype is 'int8', expected 'auto'"
            )
        if self.batch_invariant and self.sparse is not None:
            raise ValueError(
                "batch_invariant cannot go with sparse: the positions of a prompt choose blocks together, so"
                " that what they see depends on how it is cut"
            )
        if self.batch_invariant and not self.kernels:
            raise ValueError("batch_invariant needs kernels: it is true and kernels is false")
        return self


FAST: Mapping[str, object] = {"weights": "int8", "draft_tokens": 8, "kv_dtype": "int8"}
"""What :func:`fast` sets."""


def fast(config: NativeConfig) -> NativeConfig:
    """Return the settings of the fast variant: a little of the model's precision for speed, mostly where few
    requests run at once.
    """
    return config.model_copy(update=FAST)


def standard(config: NativeConfig) -> NativeConfig:
    """Return the settings without what :func:`fast` adds."""
    return config.model_copy(update={name: NativeConfig.model_fields[name].default for name in FAST})
