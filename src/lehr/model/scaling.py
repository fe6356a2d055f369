"""Rotary position scaling: how positions beyond the trained length are read, to and from ``config.json``.

The kinds are those of transformers' ``modeling_rope_utils``. The angles themselves are computed in
``rotary``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field

from lehr.core.config import Config
from lehr.core.errors import ConfigError
from lehr.model.values import count, positive, table

ScalingType = Literal["default", "linear", "dynamic", "llama3", "yarn"]
_TYPES: tuple[ScalingType, ...] = get_args(ScalingType)
_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", *_OPTIONAL, "truncate"),
}


class Rope(Config):
    """Rotary position embedding.

    ``linear`` divides positions by ``factor``. ``llama3`` divides only the slow frequencies, with a smooth step
    between (Llama 3.1 report). ``dynamic`` raises theta with the length of the sequence once it is longer than
    the trained one (NTK-aware interpolation). ``yarn`` (Peng et al. 2023, arXiv 2309.00071) divides frequencies
    by how often they turn within the trained length, and scales the attention by a factor.
    """

    type: ScalingType = "default"
    theta: float = Field(default=10_000.0, gt=0)
    factor: float = Field(default=1.0, gt=0)
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = Field(default=8192, gt=0)
    """Length that the model was trained on; ``linear`` does not use it."""
    attention_factor: float | None = Field(default=None, gt=0)
    """What ``yarn`` multiplies queries and keys by; None takes it from ``factor`` and the two ``mscale``."""
    beta_fast: float | None = Field(default=None, gt=0)
    """Turns within the trained length from which on ``yarn`` leaves a frequency alone; None is 32."""
    beta_slow: float | None = Field(default=None, gt=0)
    """Turns below which ``yarn`` divides a frequency by the whole ``factor``; None is 1."""
    mscale: float | None = Field(default=None, gt=0)
    mscale_all_dim: float | None = Field(default=None, gt=0)
    truncate: bool = True
    """``yarn`` rounds the bounds between the two to whole pairs."""


class RopeScaling(Config):
    """Position scaling to use in place of what a model's ``config.json`` says."""

    type: ScalingType = "yarn"
    """``linear``, ``dynamic``, ``llama3`` or ``yarn``; ``default`` takes a scaling away."""
    factor: float = Field(default=1.0, ge=1)
    """How many times the trained length positions may reach."""
    original_max_position_embeddings: int | None = Field(default=None, gt=0)
    """The trained length; None takes what the model says."""
    low_freq_factor: float = 1.0
    """Of ``llama3``."""
    high_freq_factor: float = 4.0
    """Of ``llama3``."""
    attention_factor: float | None = Field(default=None, gt=0)
    """Of ``yarn``; None takes it from ``factor``."""
    beta_fast: float | None = Field(default=None, gt=0)
    """Of ``yarn``; None is 32."""
    beta_slow: float | None = Field(default=None, gt=0)
    """Of ``yarn``; None is 1."""


def rescaled(rope: Rope, longest: int, scaling: RopeScaling) -> tuple[Rope, int]:
    """Return ``rope`` with another scaling, and the longest sequence that it allows; ``longest`` is the one
    before. Raises ``ConfigError`` where the trained length is not known.
    """
    original = scaling.original_max_position_embeddings
    if original is None and rope.type == "linear":
        raise ConfigError(
            "rope_scaling cannot tell the trained length of a model with linear scaling",
            expected="original_max_position_embeddings",
            hint="Add it to rope_scaling.",
        )
    if original is None:
        original = longest if rope.type == "default" else rope.original_max_position_embeddings
    values = scaling.model_dump(exclude={"original_max_position_embeddings"})
    new = Rope(theta=rope.theta, original_max_position_embeddings=original, **values)
    return new, original if new.type == "default" else round(original * new.factor)


def read_rope(raw: Mapping[str, Any], longest: int) -> tuple[Rope, int]:
    """Return the scaling that a ``config.json`` asks for, and the longest sequence: ``longest``, or what the
    scaling makes of the trained length. Raises ``ConfigError``.
    """
    scaling = table(raw, "rope_parameters") or table(raw, "rope_scaling")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in _TYPES:
        expected = ", ".join(map(repr, _TYPES))
        raise ConfigError(f"rotary scaling {kind!r} is not supported", expected=f"one of {expected}")
    if positive({**scaling, **raw}, "partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError("partial rotary embedding is not supported", expected="partial_rotary_factor 1.0")
    theta = positive(scaling, "rope_theta", positive(raw, "rope_theta", 10_000.0))
    if kind == "default":
        return Rope(theta=theta), longest
    usual, original = Rope(), longest
    if kind != "dynamic":  # there the trained length is max_position_embeddings
        original = count(scaling, "original_max_position_embeddings", default=original)
        original = count(raw, "original_max_position_embeddings", default=original)
    factor = positive(scaling, "factor", longest / original if kind == "yarn" else usual.factor)
    if kind in ("dynamic", "yarn"):
        longest = max(longest, round(original * factor))
    return (
        Rope(
            type=kind,
            theta=theta,
            factor=factor,
            low_freq_factor=positive(scaling, "low_freq_factor", usual.low_freq_factor),
            high_freq_factor=positive(scaling, "high_freq_factor", usual.high_freq_factor),
            original_max_position_embeddings=original,
            truncate=bool(scaling.get("truncate", True)),
            **{k: positive(scaling, k, 1.0) if scaling.get(k) is not None else None for k in _OPTIONAL},
        ),
        longest,
    )


def write_rope(rope: Rope) -> dict[str, Any]:
    """Return the ``rope_parameters`` of a ``config.json``."""
    found: dict[str, Any] = {"rope_type": rope.type, "rope_theta": rope.theta}
    for key in _KEYS.get(rope.type, ()):
        value = getattr(rope, key)
        if value is not None:
            found[key] = value
    return found
