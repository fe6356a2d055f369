"""Weights of the engine: loaded beside the running ones, checked, packed, then swapped in one assignment."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from lehr.core.batch import Manifest
from lehr.engine.base import EngineError
from lehr.engine.native.int8 import round_weights
from lehr.engine.native.invariant import tiled
from lehr.engine.native.kernels.load import Kernels
from lehr.engine.native.packing import pack
from lehr.engine.native.settings import WeightFormat
from lehr.model.checkpoint import file_digest, read_tensors
from lehr.model.config import ModelConfig
from lehr.model.decoder import Decoder


def prepared(
    decoder: Decoder, weights: WeightFormat, kernels: Kernels | None, *, invariant: bool = False
) -> Decoder:
    """Lay the projections of ``decoder`` out for sampling, in place; return it. ``invariant``: see there."""
    packed = pack(round_weights(decoder) if weights == "int8" else decoder, kernels)
    return tiled(packed) if invariant else packed


def published_file(manifest: Manifest) -> Path:
    """Return the file of published weights, whole. Raises :class:`EngineError` if it is not, or not there."""
    path = Path(manifest.path)
    if not path.exists():
        raise EngineError(f"weights {manifest.version} are not at {path}", expected="a published file")
    found = file_digest(path)
    if found != manifest.digest:
        raise EngineError(f"weights {manifest.version} at {path} have digest {found}", expected=manifest.digest)
    return path


def load_published(
    manifest: Manifest,
    config: ModelConfig,
    dtype: torch.dtype,
    weights: WeightFormat,
    kernels: Kernels | None,
    *,
    invariant: bool = False,
) -> Decoder:
    """Return the published weights, ready to sample from. Raises :class:`EngineError` if they are damaged.

    Their digest takes as long as laying them out: both are done at once.
    """
    with ThreadPoolExecutor(1) as beside:
        check = beside.submit(published_file, manifest)
        try:
            with torch.inference_mode():
                decoder = Decoder.from_hf(config, read_tensors(Path(manifest.path)), dtype)
                return prepared(decoder, weights, kernels, invariant=invariant)
        finally:
            check.result()  # says first what is wrong with a file that cannot be read either
