"""Which number format to compute in on this machine."""

from __future__ import annotations

import torch

from lehr.core.errors import UnknownName

NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(name: str = "auto") -> torch.dtype:
    """Return the dtype that ``name`` stands for.

    ``auto`` is bfloat16 where the processor has matrix instructions for it (AVX512-BF16, AMX) or a GPU is
    there, else float32: without them bfloat16 is slower than float32, not faster.
    """
    if name == "auto":
        return torch.bfloat16 if has_fast_bfloat16() else torch.float32
    if name not in NAMES:
        raise UnknownName.among("dtype", name, ("auto", *NAMES))
    return NAMES[name]


def has_fast_bfloat16() -> bool:
    """Return whether bfloat16 matrix products are faster than float32 ones here."""
    if torch.cuda.is_available():
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that :func:`compute_dtype` accepts for ``dtype``."""
    return str(dtype).removeprefix("torch.")
