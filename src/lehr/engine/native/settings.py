"""The engine's settings, readable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lehr.core.config import Config, Count, Dtype


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
    kernels: bool = True
    """Use compiled kernels where there is a C++ compiler; without them the engine is about half as fast."""
    kv_dtype: Literal["auto", "int8"] = "auto"
    """How keys and values are kept: ``auto`` in the compute dtype; ``int8`` with a scale for each token and
    head, in half the memory of bfloat16. That moves log-probabilities (SmolLM2-135M: by 0.016 on average), so
    traces carry the policy ``int8``."""
    tier_memory_bytes: int = Field(default=0, ge=0, lt=1 << 62)
    """Memory for keys and values that the block pool has no room for, compressed without loss; 0 is off."""
    tier_disk_bytes: int = Field(default=0, ge=0, lt=1 << 62)
    """Space on disk, in ``tier_folder``, for what ``tier_memory_bytes`` has no room for; 0 is off."""
    tier_folder: str = ""
    """Where the files go, readable by this user only and removed when the engine closes. Several engines may
    share it: each has a folder of its own in there, and as many bytes."""
    dtype: Dtype = "auto"
    """Compute dtype: ``auto``, ``float32`` or ``bfloat16``."""
