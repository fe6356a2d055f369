"""The product from panels: the numbers of a plain layer, for any number of rows, and each row by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lehr.engine.native.kernels.load import kernels_for
from lehr.engine.native.packing import pack
from lehr.engine.native.panels import ARENA, Arena, PanelLinear, can_use_panels
from lehr.model.tiny import random_decoder, tiny_config

KERNELS = kernels_for(torch.float32)
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="there is no C++ compiler")
ROWS = (*range(1, 20), 95, 96, 97, 200)


def made(
    outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = False, float32_out: bool = False
) -> tuple[nn.Linear, PanelLinear]:
    torch.manual_seed(outputs)
    plain = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    kernels = kernels_for(dtype)
    assert kernels is not None
    return plain, PanelLinear(plain, kernels, Arena(), float32_out=float32_out)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (100, 34), (1, 2), (16, 6), (576, 1536)])
@pytest.mark.parametrize("bias", [True, False])
def test_panels_give_the_product_of_any_number_of_rows(
    dtype: torch.dtype, outputs: int, inputs: int, bias: bool
) -> None:
    plain, layer = made(outputs, inputs, dtype, bias=bias)
    near = 1e-5 if dtype.itemsize > 2 else 1e-2
    for rows in ROWS:
        x = torch.randn(rows, inputs).to(dtype)
        with torch.inference_mode():
            found = layer(x)
            expected = nn.functional.linear(
                x.float(), plain.weight.float(), plain.bias.float() if bias else None
            )
        assert found.dtype is dtype
        torch.testing.assert_close(found.float(), expected, atol=near, rtol=near)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_whatever_it_is_computed_with(dtype: torch.dtype) -> None:
    _, layer = made(100, 1600, dtype)
    x = torch.randn(max(ROWS), 1600).to(dtype)
    with torch.inference_mode():
        alone = torch.cat([layer(row[None]) for row in x])
        for rows in ROWS:
            assert torch.equal(layer(x[:rows]), alone[:rows]), rows


@needs_kernels
@pytest.mark.parametrize("rows", [1, 13, 200])
def test_a_product_in_bfloat16_can_be_left_unrounded(rows: int) -> None:
    plain, layer = made(100, 576, torch.bfloat16, float32_out=True)
    x = 20 * torch.randn(rows, 576).bfloat16()
    with torch.inference_mode():
        found = layer(x)
        expected = (x.double() @ plain.weight.double().T).float()
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)
    assert not torch.equal(found, found.bfloat16().float())


def test_an_odd_number_of_inputs_has_no_pairs_in_bfloat16() -> None:
    assert not can_use_panels(torch.zeros(4, 33, dtype=torch.bfloat16))
    assert can_use_panels(torch.zeros(4, 33))


@needs_kernels
def test_a_packed_decoder_uses_panels_where_they_pay() -> None:
    assert KERNELS is not None
    decoder = pack(random_decoder(tiny_config(), seed=1), KERNELS)
    layers = [getattr(layer, name) for layer in decoder.layers for name in ("qkv", "o", "gate_up", "down")]
    assert all(isinstance(part, PanelLinear) is KERNELS.panels_pay for part in (*layers, decoder.head))


def test_tensors_of_an_arena_are_apart_and_aligned() -> None:
    arena = Arena()
    found = [arena.zeros((n,), torch.float32) for n in (3, 17, ARENA // 4, 5)]
    for value, tensor in enumerate(found):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(value)
    assert all(bool((tensor == value).all()) for value, tensor in enumerate(found))
