"""Projections whose result for a row does not depend on the rows beside it.

A matrix library sums in another order for another number of rows: what a request gets then depends on how
many others run, on how its prompt is cut, and on what of it was cached. Here every product is of one fixed
number of rows; what is missing is filled with zeros (He et al. 2025, "Defeating Nondeterminism in LLM
Inference"). The order may still depend on where in such a tile a row stands: that is tried once for each shape,
on the machine that computes, and refused if it does.

Everything else that the engine does to a row, it does in an order that the row's own position decides: see
``fused`` and ``sampler``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lehr.core.errors import ConfigError
from lehr.engine.native.int8 import FEW, Int8Linear
from lehr.engine.native.kernels.build import INSTALL, why_not
from lehr.engine.native.packing import PROJECTIONS, PackedLinear
from lehr.engine.native.panels import PanelLinear
from lehr.model.decoder import Decoder

_ROWS = {torch.bfloat16: 32}
_OTHERWISE = FEW
"""Rows of a tile: as many as cost little more than one. Weights of one byte are read so up to :data:`FEW`."""

_tried: set[tuple[object, ...]] = set()


class Tiled(nn.Module):
    """A linear layer computed ``rows`` rows at a time. Input ``[N, in]``, any N."""

    def __init__(self, inner: nn.Module, inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.rows = _OTHERWISE if isinstance(inner, Int8Linear) else tile_rows(dtype)
        outputs = inner.outputs if isinstance(inner, PackedLinear | PanelLinear | Int8Linear) else None
        tried = (type(inner), inputs, outputs, dtype, torch.get_num_threads())
        if outputs is None or tried not in _tried:
            require_same_in_every_row(inner, inputs, dtype, self.rows)
            _tried.add(tried)

    def forward(self, x_ND: Tensor) -> Tensor:
        """Return what ``inner`` says of every row."""
        return in_tiles(self.inner, x_ND, self.rows)


def tile_rows(dtype: torch.dtype) -> int:
    """Return the rows of a tile in ``dtype``."""
    return _ROWS.get(dtype, _OTHERWISE)


def in_tiles(compute: Callable[[Tensor], Tensor], x_ND: Tensor, rows: int) -> Tensor:
    """Return ``compute(x_ND)``, contiguous, which is called with exactly ``rows`` rows every time."""
    count = len(x_ND)
    missing = -count % rows
    if missing:
        x_ND = torch.cat((x_ND, x_ND.new_zeros(missing, x_ND.shape[1])))
    parts = [compute(tile) for tile in x_ND.contiguous().split(rows)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:count]


def require_same_in_every_row(
    compute: Callable[[Tensor], Tensor], inputs: int, dtype: torch.dtype, rows: int
) -> None:
    """Try whether a row gets the same bits wherever in a tile it stands.

    Raises :class:`ConfigError` if it does not.
    """
    x_RD = torch.randn(rows, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    found_RO = compute(x_RD)
    for turn in range(1, rows):
        if not torch.equal(compute(x_RD.roll(turn, 0)), found_RO.roll(turn, 0)):
            raise ConfigError(
                f"batch_invariant: the product of {rows} rows of {inputs} with {found_RO.shape[1]} outputs in"
                f" {str(dtype).removeprefix('torch.')} depends on a row's place among them on this processor",
                expected="the same bits in every place",
                hint="Try another dtype, or leave batch_invariant off.",
            )


@torch.inference_mode()
def tiled(decoder: Decoder) -> Decoder:
    """Put every projection of ``decoder``, laid out for sampling, into a :class:`Tiled`, in place; return it.

    Raises :class:`ConfigError` where there are no compiled kernels: how torch's own operations divide what is
    between the projections depends on the size of the batch.
    """
    why = why_not()
    if why:
        raise ConfigError(f"batch_invariant needs compiled kernels: {why}", hint=f"{INSTALL}.")
    config, dtype = decoder.config, decoder.embed.weight.dtype
    inputs = {"o": config.q_size, "down": config.intermediate_size}
    for layer in decoder.layers:
        for name in PROJECTIONS:
            inner = layer.get_submodule(name)
            setattr(layer, name, Tiled(inner, inputs.get(name, config.hidden_size), dtype))
    decoder.head = Tiled(decoder.head, config.hidden_size, dtype)  # pyright: ignore[reportAttributeAccessIssue]
    return decoder
