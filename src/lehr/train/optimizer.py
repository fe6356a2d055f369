"""AdamW with float32 master weights, whatever the compute dtype, and gradient clipping by global norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lehr.core.errors import ConfigError
from lehr.train.base import TrainConfig
from lehr.train.schedule import rate_factor


class MasterAdamW:
    """Owns gradient accumulators and moments (Loshchilov & Hutter, arXiv 1711.05101).

    ``masters`` are float32; ``compute`` are the parameters that forward and backward use: the same ones, or
    copies in another dtype that are refreshed after each step.

    Life cycle: :meth:`clear`, any number of backward passes each followed by :meth:`collect`, then
    :meth:`norm` and :meth:`step`.
    """

    def __init__(
        self, masters: Mapping[str, nn.Parameter], compute: Mapping[str, nn.Parameter], config: TrainConfig
    ) -> None:
        self.config = config
        self.masters = {name: p.data for name, p in masters.items()}
        self.copies = {name: p for name, p in compute.items() if p is not masters[name]}
        self.grads = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.first = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.second = {name: torch.zeros_like(master) for name, master in self.masters.items()}
        self.steps = 0
        for name, parameter in masters.items():
            parameter.grad = None if name in self.copies else self.grads[name]

    @torch.no_grad()
    def clear(self) -> None:
        """Set accumulated gradients to zero."""
        for grad in self.grads.values():
            grad.zero_()

    def collect(self) -> None:
        """Take over what a backward pass left in copies of another dtype."""
        for name, copy in self.copies.items():
            if copy.grad is not None:
                self.grads[name].add_(copy.grad)
                copy.grad = None

    def refresh(self) -> None:
        """Bring the copies up to date with the masters."""
        for name, copy in self.copies.items():
            copy.data.copy_(self.masters[name])

    def norm(self) -> float:
        """Return the global L2 norm of the accumulated gradient."""
        return float(nn.utils.get_total_norm(list(self.grads.values())))

    @property
    def learning_rate(self) -> float:
        """The rate of the next step."""
        return self.config.learning_rate * rate_factor(self.steps, self.config)

    def step(self, norm: float) -> None:
        """Update the weights with the accumulated gradient, scaled down to ``max_grad_norm``."""
        rate = self.learning_rate
        self.steps += 1
        scale = torch.tensor(max(1.0, norm / self.config.max_grad_norm))
        decayed = [name for name, master in self.masters.items() if master.ndim > 1]
        others = [name for name, master in self.masters.items() if master.ndim <= 1]
        for names, decay in ((decayed, self.config.weight_decay), (others, 0.0)):
            if names:
                self._fused(names, rate, decay, scale)
        self.refresh()

    @torch.no_grad()
    def _fused(self, names: list[str], rate: float, decay: float, scale: Tensor) -> None:
        torch.ops.aten._fused_adamw_(
            [self.masters[n] for n in names],
            [self.grads[n] for n in names],
            [self.first[n] for n in names],
            [self.second[n] for n in names],
            [],
            [torch.tensor(float(self.steps)) for _ in names],
            amsgrad=False,
            lr=rate,
            beta1=self.config.betas[0],
            beta2=self.config.betas[1],
            weight_decay=decay,
            eps=1e-8,
            maximize=False,
            grad_scale=scale,
            found_inf=None,
        )

    def state(self) -> dict[str, Tensor]:
        """Return everything that a resume needs, as plain tensors."""
        tensors = {"steps": torch.tensor([self.steps], dtype=torch.int64)}
        tensors |= {f"first.{name}": moment for name, moment in self.first.items()}
        return tensors | {f"second.{name}": moment for name, moment in self.second.items()}

    def _missing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return sorted(set(self.state()) - set(tensors))

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over :meth:`state`. Raises :class:`ConfigError` if it belongs to another model."""
        missing = self._missing(tensors)
        if missing:
            raise ConfigError(
                f"the optimiser state lacks {missing[0]!r}", hint="It was saved by another model or version."
            )
        self.steps = int(tensors["steps"][0])
        for name in self.masters:
            self.first[name].copy_(tensors[f"first.{name}"])
            self.second[name].copy_(tensors[f"second.{name}"])
