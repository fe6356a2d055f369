"""Adapters of low rank (Hu et al. 2021) in the format of PEFT: ``adapter_config.json`` and safetensors.

A projection with weight W becomes W + scale · B A. Projections that the decoder computes as one (``qkv``,
``gate_up``) have their adapters joined in the same way, A stacked and B side by side.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lehr.core.errors import ConfigError, UnknownName
from lehr.model.checkpoint import read_tensors
from lehr.model.config import ModelConfig
from lehr.model.values import positive, read_json

SETTINGS, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(
    r"base_model\.model\.model\.layers\.(\d+)\.(self_attn|mlp)\.(\w+)\.lora_([AB])(?:\.default)?\.weight"
)
_PLAIN: Mapping[str, object] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "layer_replication": None,
    "lora_bias": False,
    "modules_to_save": None,
    "trainable_token_indices": None,
    "use_dora": False,
}
"""Settings of PEFT that change what an adapter is, each with the value that is known here."""

Place = tuple[int, str]
"""A layer's number, and one of ``qkv``, ``o``, ``gate_up``, ``down``."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one fused projection: ``x @ down_RI.T @ up_OR.T``. The scale is in ``up_OR``."""

    down_RI: Tensor
    up_OR: Tensor

    def __call__(self, x_NI: Tensor) -> Tensor:
        """Return what is added for each row."""
        return x_NI @ self.down_RI.T @ self.up_OR.T


def read_adapter(folder: Path, config: ModelConfig, dtype: torch.dtype) -> dict[Place, LowRank]:
    """Return the adapter in ``folder`` for a model of this shape, in ``dtype``. Nothing is unpickled.

    Raises :class:`ConfigError` that names the file, tensor or setting which does not fit.
    """
    settings = read_json(folder / SETTINGS)
    if not settings or not (folder / WEIGHTS).is_file():
        missing = WEIGHTS if settings else SETTINGS
        raise ConfigError(
            f"no adapter in {folder}: {missing} is missing",
            expected=f"{SETTINGS} and {WEIGHTS}, as PEFT saves them",
            hint="A .bin file is not read, since it can run code; save the adapter as safetensors.",
        )
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"{folder} holds an adapter of type {settings.get('peft_type')!r}", expected="LORA")
    for name, known in _PLAIN.items():
        if (settings.get(name, known) or None) != (known or None):
            raise ConfigError(
                f"{folder / SETTINGS} has {name}={json.dumps(settings[name])}", expected=json.dumps(known)
            )
    pairs = _pairs(folder, config, read_tensors(folder / WEIGHTS))
    places: dict[Place, list[tuple[slice, Tensor, Tensor]]] = {}
    for (layer, name), (down, up) in sorted(pairs.items()):
        fused, rows = projections(config)[name][:2]
        scale = _scale(settings, name, layer, down.shape[0])
        places.setdefault((layer, fused), []).append((rows, down, up.double() * scale))
    return {place: _joined(parts, _width(config, place[1]), dtype) for place, parts in places.items()}


def _pairs(
    folder: Path, config: ModelConfig, tensors: Mapping[str, Tensor]
) -> dict[tuple[int, str], tuple[Tensor, Tensor]]:
    """Return A and B of each projection, their shapes checked."""
    parts = projections(config)
    halves: dict[tuple[int, str], dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        found = _TENSOR.fullmatch(key)
        if found is None:
            raise ConfigError(
                f"{folder} adapts {key!r}",
                expected=f"weights A and B of {', '.join(parts)} only",
                hint="Train the adapter without other target modules, or merge it into the model.",
            )
        layer, part, name, half = int(found[1]), found[2], found[3], found[4]
        if name not in parts or parts[name][3] != part:
            raise UnknownName.among("target of an adapter", name, parts)
        if layer >= config.num_layers:
            raise ConfigError(
                f"{folder} adapts layer {layer}", expected=f"layers below {config.num_layers}",
                hint="The adapter belongs to another model.",
            )  # fmt: skip
        halves.setdefault((layer, name), {})[half] = tensor
    if not halves:
        raise ConfigError(f"{folder / WEIGHTS} is empty", expected="at least one adapted projection")
    pairs: dict[tuple[int, str], tuple[Tensor, Tensor]] = {}
    for (layer, name), both in halves.items():
        if set(both) != {"A", "B"}:
            raise ConfigError(
                f"{folder}: {name} of layer {layer} has only {'/'.join(both)}", expected="A and B"
            )
        _, rows, inputs, _ = parts[name]
        down, up = both["A"], both["B"]
        wanted = f"A (rank, {inputs}) and B ({rows.stop - rows.start}, rank)"
        fits = down.ndim == up.ndim == 2 and down.shape[1] == inputs
        if not fits or up.shape != (rows.stop - rows.start, down.shape[0]) or not down.shape[0]:
            raise ConfigError(
                f"{folder}: {name} of layer {layer} has A {tuple(down.shape)} and B {tuple(up.shape)}",
                expected=wanted,
                hint="The adapter belongs to another model.",
            )
        if not (down.isfinite().all() and up.isfinite().all()):
            raise ConfigError(f"{folder}: {name} of layer {layer} is not finite", expected="finite numbers")
        pairs[layer, name] = (down, up)
    return pairs


def projections(config: ModelConfig) -> dict[str, tuple[str, slice, int, str]]:
    """Return for each projection: the fused one, its outputs there, its inputs, and the part of the layer."""
    q, kv, hidden, inner = config.q_size, config.kv_size, config.hidden_size, config.intermediate_size
    return {
        "q_proj": ("qkv", slice(0, q), hidden, "self_attn"),
        "k_proj": ("qkv", slice(q, q + kv), hidden, "self_attn"),
        "v_proj": ("qkv", slice(q + kv, q + 2 * kv), hidden, "self_attn"),
        "o_proj": ("o", slice(0, hidden), q, "self_attn"),
        "gate_proj": ("gate_up", slice(0, inner), hidden, "mlp"),
        "up_proj": ("gate_up", slice(inner, 2 * inner), hidden, "mlp"),
        "down_proj": ("down", slice(0, hidden), inner, "mlp"),
    }


def _width(config: ModelConfig, fused: str) -> int:
    return max(rows.stop for name, rows, _, _ in projections(config).values() if name == fused)


def _scale(settings: Mapping[str, Any], name: str, layer: int, rank: int) -> float:
    """Return alpha / rank, or alpha / √rank (Kalajdzievski 2023)."""
    part = "mlp" if name in ("gate_proj", "up_proj", "down_proj") else "self_attn"
    module = f"model.layers.{layer}.{part}.{name}"
    alphas: Iterator[tuple[str, Any]] = iter((settings.get("alpha_pattern") or {}).items())
    named = next((a for key, a in alphas if re.fullmatch(rf"(.*\.)?({key})", module)), None)
    alpha = positive(settings, "lora_alpha", 8.0) if named is None else float(named)
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _joined(parts: list[tuple[slice, Tensor, Tensor]], width: int, dtype: torch.dtype) -> LowRank:
    down_RI = torch.cat([down for _, down, _ in parts]).to(dtype)
    up_OR = torch.zeros(width, len(down_RI), dtype=torch.float64)
    at = 0
    for rows, down, up in parts:
        up_OR[rows, at : at + len(down)] = up
        at += len(down)
    return LowRank(down_RI.contiguous(), up_OR.to(dtype))
