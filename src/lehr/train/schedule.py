"""Learning rate over the steps of a stage, as a multiple of ``TrainConfig.learning_rate``."""

from __future__ import annotations

import math

from lehr.core.errors import ConfigError
from lehr.train.base import TrainConfig


def rate_factor(step: int, config: TrainConfig) -> float:
    """Return the factor of step ``step``, counted from 0.

    It rises linearly over ``warmup_steps`` and then follows ``schedule`` down to ``final_rate``, which it
    reaches with the last of ``total_steps`` and keeps. ``wsd`` stays at 1 until the last ``decay_steps``, which
    are linear (warm-up, stable, decay; Hu et al. 2024, MiniCPM, arXiv 2404.06395).

    Raises :class:`ConfigError` where the schedule does not know when to end.
    """
    if config.schedule != "constant" and not config.total_steps:
        raise ConfigError(
            f"the schedule {config.schedule!r} was not told when to end",
            expected="total_steps",
            hint="Only a stage with a known number of steps sets it by itself.",
        )
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    decay = config.decay_steps if config.schedule == "wsd" else config.total_steps - config.warmup_steps
    begun = step + 1 - (config.total_steps - decay)
    part = min(1.0, max(0.0, begun / decay))
    shape = (1 + math.cos(math.pi * part)) / 2 if config.schedule == "cosine" else 1 - part
    return config.final_rate + (1 - config.final_rate) * shape
