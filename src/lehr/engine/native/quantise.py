"""Keys and values as int8, with one float32 scale for each token and head.

A stored vector is ``head_size`` bytes, padded to a multiple of four, and the four bytes of its scale behind
them: whatever copies positions copies the scales with them. ``x = q * scale``, ``scale = max |x| / 127``. At a
head size of 64 that is 68 bytes for the 128 of bfloat16.

A few dimensions of keys are much larger than the others and would take the steps of all. So queries and keys
are turned by an orthonormal Walsh-Hadamard transform first (:func:`spread`), which leaves their products as
they are (Ashkboos et al. 2024, "QuaRot"): of SmolLM2-135M's keys that halves the error.

``kernels/int8_kv.cpp`` does the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 127
_SCALE = torch.float32.itemsize


def stored_width(head_size: int, dtype: torch.dtype) -> int:
    """Return how many elements of ``dtype`` one token's key of one head takes."""
    return -(-head_size // _SCALE) * _SCALE + _SCALE if dtype is torch.int8 else head_size


def spread(x: Tensor) -> Tensor:
    """Return ``x``, ``[..., E]``, transformed in runs as long as the largest power of two that divides E."""
    size = x.shape[-1]
    run = size & -size
    matrix = torch.ones(1, 1)
    while len(matrix) < run:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (x.float().unflatten(-1, (-1, run)) @ (matrix * run**-0.5)).flatten(-2)


def store(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x``, ``[..., E]``, as it is stored in ``dtype``: int8 is quantised, others are left alone."""
    if dtype is not torch.int8:
        return x
    largest = x.float().abs().amax(dim=-1, keepdim=True)
    inverse = torch.where(largest > 0, STEPS / largest, 0.0)
    steps = (x.float() * inverse).round().to(torch.int8)
    stored = torch.zeros(*x.shape[:-1], stored_width(x.shape[-1], dtype), dtype=dtype)
    stored[..., : x.shape[-1]] = steps
    stored[..., -_SCALE:] = (largest / STEPS).view(torch.int8)
    return stored


def load(stored: Tensor, head_size: int, dtype: torch.dtype) -> Tensor:
    """Return what :func:`store` was given, ``[..., E]`` in ``dtype``, as exactly as it was kept."""
    if stored.dtype is not torch.int8:
        return stored
    scale = stored[..., -_SCALE:].contiguous().view(torch.float32)
    return (stored[..., :head_size].float() * scale).to(dtype)
