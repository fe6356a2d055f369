"""The engine's settings, readable without torch."""

from __future__ import annotations

from pydantic import Field

from lehr.core.config import Config, Count, Dtype


class TransformersConfig(Config):
    """How much the engine holds at once. Requests take turns: each is computed by itself."""

    max_running: Count = 16
    """Requests whose keys and values are held; in a step, each gets one token."""
    cache_tokens: int = Field(default=32768, ge=16, lt=1 << 31)
    """Tokens that running requests may reach, all together; those beyond wait."""
    dtype: Dtype = "auto"
    """Compute dtype: ``auto``, ``float32`` or ``bfloat16``."""
