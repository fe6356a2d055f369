"""Training adapters of low rank beside frozen weights (Hu et al. 2021, arXiv 2106.09685).

The weights that forward and backward use are the merged ones, W + alpha / rank · B A: what is trained is
what engines sample from, with no rounding between. The gradient of a merged weight, G, becomes that of its
adapter as soon as a backward pass leaves it: Bᵀ G for A, and G Aᵀ for B, each times alpha / rank. So gradients
of full size exist for one projection at a time, and the optimiser holds moments for A and B alone.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from lehr.core.errors import ConfigError
from lehr.model.decoder import Decoder
from lehr.model.lora import SETTINGS, WEIGHTS, projections
from lehr.train.base import LoraConfig
from lehr.train.publish import write_safetensors


class Adapters:
    """The trained adapter of a decoder. ``master`` always holds the merged weights in float32, ``compute`` in
    the dtype of the forward pass; ``base`` keeps the adapted weights as they were.
    """

    def __init__(self, master: Decoder, compute: Decoder, config: LoraConfig) -> None:
        self.config = config
        self.scale = config.alpha / config.rank
        self._masters = dict(master.named_parameters())
        self._parts = projections(master.config)
        source = torch.Generator().manual_seed(config.seed)
        self.base: dict[str, Tensor] = {}
        self.weights: dict[str, nn.Parameter] = {}
        self._places: dict[str, list[tuple[str, slice]]] = {}
        for number in range(master.config.num_layers):
            for target in config.targets:
                fused, rows, inputs, _ = self._parts[target]
                weight, name = f"layers.{number}.{fused}.weight", f"{number}.{target}"
                down = torch.empty(config.rank, inputs).uniform_(-1, 1, generator=source) / math.sqrt(inputs)
                self.weights[f"{name}.A"] = nn.Parameter(down)
                self.weights[f"{name}.B"] = nn.Parameter(torch.zeros(rows.stop - rows.start, config.rank))
                self._places.setdefault(weight, []).append((name, rows))
        for name, parameter in compute.named_parameters():
            parameter.requires_grad_(name in self._places)
            parameter.grad = None
            if name in self._places:
                self.base[name] = self._masters[name].detach().clone()
                parameter.register_post_accumulate_grad_hook(self._collector(self._places[name]))
        self._copies = {
            name: p
            for name, p in compute.named_parameters()
            if name in self.base and p is not self._masters[name]
        }

    def _collector(self, places: list[tuple[str, slice]]) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def collect(parameter: Tensor) -> None:
            if parameter.grad is None:
                return
            for name, rows in places:
                grad_OI = parameter.grad[rows].float()
                down, up = self.weights[f"{name}.A"], self.weights[f"{name}.B"]
                if down.grad is not None and up.grad is not None:
                    down.grad.addmm_(up.t(), grad_OI, alpha=self.scale)
                    up.grad.addmm_(grad_OI, down.t(), alpha=self.scale)
            parameter.grad = None

        return collect

    @torch.no_grad()
    def merge(self) -> None:
        """Bring the merged weights up to date with the adapter."""
        for weight, places in self._places.items():
            merged = self._masters[weight].data.copy_(self.base[weight])
            for name, rows in places:
                merged[rows].addmm_(self.weights[f"{name}.B"], self.weights[f"{name}.A"], alpha=self.scale)
            if weight in self._copies:
                self._copies[weight].data.copy_(merged)

    def state(self) -> dict[str, Tensor]:
        """Return what a resume needs: the adapter and the weights beneath it."""
        tensors = {f"adapter.{name}": p.detach() for name, p in self.weights.items()}
        return tensors | {f"base.{name}": tensor for name, tensor in self.base.items()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over :meth:`state`. Raises :class:`ConfigError` if it is that of another adapter."""
        held = self.state()
        for name, mine in held.items():
            if name not in tensors or tensors[name].shape != mine.shape:
                raise ConfigError(
                    f"the saved training state has no fitting {name!r}",
                    expected=f"an adapter of rank {self.config.rank} for {', '.join(self.config.targets)}",
                    hint="Resume with the lora settings that it was saved with.",
                )
        for name, mine in held.items():
            mine.copy_(tensors[name])
        self.merge()

    def frozen(self) -> Adapters:
        """Return a copy that further steps do not change, to be written."""
        held = copy.copy(self)
        held.weights = {name: nn.Parameter(p.detach().clone()) for name, p in self.weights.items()}
        return held

    def write(self, folder: Path, base_model: str = "") -> None:
        """Write the adapter into ``folder`` as PEFT does: engines, ``model.lora`` and PEFT read it."""
        folder.mkdir(parents=True, exist_ok=True)
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "r": self.config.rank,
            "lora_alpha": self.config.alpha,
            "lora_dropout": 0.0,
            "target_modules": list(self.config.targets),
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
        }
        (folder / SETTINGS).write_text(json.dumps(settings, indent=2) + "\n")
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.weights.items():
            layer, target, half = name.split(".")
            part = self._parts[target][3]
            key = f"base_model.model.model.layers.{layer}.{part}.{target}.lora_{half}.weight"
            tensors[key] = parameter.detach()
        write_safetensors(folder / WEIGHTS, tensors)
