"""Weights of one byte an element: the products, and an engine on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lehr.core.errors import ConfigError
from lehr.core.trace import Sampling
from lehr.engine.native import int8
from lehr.engine.native.int8 import FEW, Int8Linear, quantized
from lehr.engine.native.kernels.load import kernels_for
from lehr.engine.native.scoring import score
from lehr.model.decoder import Decoder

KERNELS = kernels_for(torch.float32)
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="there is no C++ compiler")


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("outputs", "inputs"), [(960, 576), (100, 33), (1, 1), (64, 7)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("float32_out", [True, False])
def test_few_rows_give_the_product_with_the_rounded_weight(
    dtype: torch.dtype, outputs: int, inputs: int, bias: bool, float32_out: bool
) -> None:
    torch.manual_seed(outputs)
    plain = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    kernels = kernels_for(dtype)
    assert kernels is not None
    layer = Int8Linear(plain, kernels, float32_out=float32_out)
    rounded, scales = quantized(plain.weight.detach())
    for rows in (*range(1, 10), FEW, FEW + 1):
        x = torch.randn(rows, inputs).to(dtype)
        expected = x.float() @ (rounded * scales[:, None]).T + (plain.bias.float() if bias else 0)
        with torch.inference_mode():
            found = layer(x)
        assert found.dtype is (torch.float32 if float32_out else dtype)
        near = 1e-5 if dtype.itemsize > 2 else 1e-2
        torch.testing.assert_close(found.float(), expected, atol=near, rtol=near)


def test_rounding_is_off_by_half_a_step_at_most_and_zeros_stay() -> None:
    weight = torch.randn(5, 300)
    weight[2] = 0
    rounded, scales = quantized(weight)
    assert bool(((rounded * scales[:, None] - weight).abs() <= scales[:, None] / 2 + 1e-7).all())
    assert not rounded[2].any() and bool(rounded[[0, 1, 3, 4]].abs().amax(dim=1).eq(127).all())


def rounded(decoder: Decoder) -> Decoder:
    """The same decoder with every projection rounded, as plain weights."""
    with torch.no_grad():
        for layer in decoder.blocks():
            for part in (layer.qkv, layer.o, layer.gate_up, layer.down):
                whole, scales = quantized(part.weight)
                part.weight.copy_(whole * scales[:, None])
        whole, scales = quantized(decoder.head.weight)
        head = nn.Linear(decoder.config.hidden_size, decoder.config.vocab_size, bias=False)
        head.weight.copy_(whole * scales[:, None])
        decoder.head = head
    return decoder


@needs_kernels
def test_an_engine_on_rounded_weights_samples_what_a_decoder_with_them_says(bench: Any) -> None:
    engine = bench.engine(weights="int8", draft_tokens=4)
    requests = [
        engine.submit(bench.prompt(length), Sampling(max_tokens=40, seed=length)) for length in (5, 40, 90)
    ]
    bench.run(engine, *requests)
    reference = rounded(bench.decoder())
    for request in requests:
        expected = score(reference, request.tokens, 1.0)[request.prompt_length - 1 :]
        np.testing.assert_allclose(request.logprobs, expected, atol=1e-4)
        np.testing.assert_allclose(
            engine.score(request.tokens)[request.prompt_length - 1 :], expected, atol=1e-4
        )


@needs_kernels
def test_new_weights_are_rounded_as_well(bench: Any) -> None:
    engine = bench.engine(weights="int8")
    bench.swap(engine, seed=2)
    request = engine.submit(bench.prompt(20), Sampling(max_tokens=20, seed=0))
    bench.run(engine, request)
    expected = score(rounded(bench.decoder(2)), request.tokens, 1.0)[19:]
    np.testing.assert_allclose(request.logprobs, expected, atol=1e-4)


def test_without_a_compiler_rounded_weights_are_refused(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "kernels_for", lambda dtype: None)
    with pytest.raises(ConfigError, match="need compiled kernels"):
        bench.engine(weights="int8")
