"""Adapters side by side: which are loaded, and what each adds to the rows of its requests.

The decoder stays as it is. While an adapter is loaded, hooks stand on its projections; in a step in which a
request uses one they add its part to that request's rows. An engine without adapters has no hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lehr.core.errors import ConfigError, UnknownName
from lehr.engine.native.invariant import in_tiles, require_same_in_every_row
from lehr.engine.native.packing import PROJECTIONS
from lehr.model.decoder import Decoder
from lehr.model.lora import LowRank, Place


@dataclass(frozen=True, eq=False, slots=True)
class Adapter:
    """One loaded adapter. ``identity`` is its own: an adapter loaded again under the same name has another."""

    name: str
    identity: bytes
    parts: Mapping[Place, LowRank]


@dataclass(slots=True)
class _Step:
    """The rows that use adapters in the forward that runs. tile: rows of every product; 0 is all."""

    tile: int
    rows: list[tuple[Adapter, Tensor]] = field(default_factory=list[tuple[Adapter, Tensor]])


class Adapters:
    """The adapters of one engine. Requests hold theirs: one that is replaced or unloaded serves those that
    began with it, and is freed with the last of them. ``tile``: see ``invariant``.
    """

    def __init__(self, tile: int = 0) -> None:
        self._loaded: dict[str, Adapter] = {}
        self._numbers = count(1)
        self._hooks: list[RemovableHandle] = []
        self._step = _Step(tile)
        self._decoder: Decoder | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of those that are loaded."""
        return tuple(self._loaded)

    def get(self, name: str) -> Adapter:
        """Return the one that is loaded as ``name``. Raises :class:`UnknownName`."""
        if name not in self._loaded:
            hint = "" if self._loaded else "None is loaded."
            raise UnknownName.among("adapter", name, self._loaded or ["no adapter"], hint=hint)
        return self._loaded[name]

    def load(self, name: str, parts: Mapping[Place, LowRank]) -> Adapter:
        """Make ``parts`` known as ``name``, in the place of what was known so."""
        if not name:
            raise ConfigError("an adapter was given no name", expected="a name that requests can say")
        for part in parts.values() if self._step.tile else ():
            require_same_in_every_row(part, part.down_RI.shape[1], part.down_RI.dtype, self._step.tile)
        adapter = Adapter(name, f"{name}/{next(self._numbers)}".encode(), parts)
        self._loaded[name] = adapter
        return adapter

    def unload(self, name: str) -> None:
        """Forget an adapter. Raises :class:`UnknownName`."""
        del self._loaded[self.get(name).name]

    def begin(self, decoder: Decoder, rows: Sequence[tuple[Adapter | None, int, int]]) -> None:
        """Add, in the next forward of ``decoder``, to rows from the first number up to the second."""
        by_adapter: dict[Adapter, list[int]] = {}
        for adapter, first, last in rows:
            if adapter is not None:
                by_adapter.setdefault(adapter, []).extend(range(first, last))
        self._step.rows = [(adapter, torch.tensor(some)) for adapter, some in by_adapter.items()]
        if not self._step.rows and not self._loaded:
            self._unhook()
        elif self._step.rows and decoder is not self._decoder:
            self._unhook()
            self._hook(decoder)

    def end(self) -> None:
        """Hold no adapter after a forward."""
        self._step.rows = []

    def _hook(self, decoder: Decoder) -> None:
        self._decoder = decoder
        for number, layer in enumerate(decoder.blocks()):
            for name in PROJECTIONS:
                hook = _hook_of(self._step, (number, name))
                self._hooks.append(layer.get_submodule(name).register_forward_hook(hook))

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._decoder = None


def _hook_of(step: _Step, place: Place) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    def add(module: nn.Module, inputs: tuple[Tensor, ...], output_NO: Tensor) -> None:
        for adapter, rows_M in step.rows:
            part = adapter.parts.get(place)
            if part is not None:
                x_MI = inputs[0][rows_M]
                added_MO = in_tiles(part, x_MI, step.tile) if step.tile else part(x_MI)
                output_NO.index_add_(0, rows_M, added_MO)

    return add
