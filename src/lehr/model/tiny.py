"""A tiny random decoder, built in code, for tests and for the two-minute run."""

from __future__ import annotations

import torch

from lehr.model.config import ModelConfig, Rope
from lehr.model.decoder import Decoder

BYTES = 256
SPECIALS = 8
"""Ids 256 and up are special tokens; what they mean is the byte tokenizer's business."""


def tiny_config(
    *, vocab_size: int = BYTES + SPECIALS, num_layers: int = 4, hidden_size: int = 64, max_positions: int = 2048
) -> ModelConfig:
    """Return the shape of the tiny model: a Llama with grouped-query attention and a tied head."""
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 5 // 2,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        head_size=hidden_size // 4,
        max_positions=max_positions,
        rope=Rope(theta=10_000.0),
        tied_head=True,
    )


def random_decoder(
    config: ModelConfig | None = None, *, seed: int = 0, dtype: torch.dtype = torch.float32, std: float = 0.02
) -> Decoder:
    """Return a decoder with normal random weights that depend on ``config``, ``seed`` and ``std`` only."""
    config = config or tiny_config()
    with torch.device("meta"):
        decoder = Decoder(config)
    shapes = {name: tensor.shape for name, tensor in decoder.to_hf().items()}
    source = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        if "norm" in name:
            tensors[name] = torch.ones(shape)
        elif name.endswith(".bias"):
            tensors[name] = torch.zeros(shape)
        else:
            tensors[name] = torch.randn(shape, generator=source) * std
    return Decoder.from_hf(config, tensors, dtype)


def tiny_decoder(*, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    """Return the tiny model. Equal seeds give equal weights."""
    return random_decoder(tiny_config(), seed=seed, dtype=dtype)
