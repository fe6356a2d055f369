"""How an SGLang server runs, readable without SGLang. Names in brackets are the server's own options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lehr.core.config import Config, Count, Dtype


class SglangConfig(Config):
    """A server that is started for this run, or with ``url`` one that runs already."""

    type: Literal["sglang"] = "sglang"
    python: Path = Path(".venv-sglang/bin/python")
    """Interpreter of the environment that SGLang is installed in."""
    url: str | None = None
    """Attach to this server instead of starting one. It must not run with
    ``SGLANG_RETURN_ORIGINAL_LOGPROB``, and must serve nobody else."""
    token_variable: str = "LEHR_SGLANG_TOKEN"
    """Environment variable that holds the token [--api-key] of the server at ``url``."""
    dtype: Dtype = "auto"
    """Compute dtype [--dtype]."""
    length: Count | None = None
    """Tokens of a prompt and its completion together [--context-length]; the default is the model's limit."""
    max_running: Count = 64
    """Requests that decode in one step [--max-running-requests]."""
    chunk_tokens: Count | None = None
    """Tokens of a prompt computed in one step [--chunked-prefill-size]."""
    memory_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Share of the accelerator's memory for weights, keys and values [--mem-fraction-static]."""
    kv_dtype: str = "auto"
    """Number format of keys and values [--kv-cache-dtype]. Any but ``auto`` changes the distribution: its
    completions say ``quantized``."""
    offload_gib: Count | None = None
    """Main memory for blocks that do not fit the accelerator [--enable-hierarchical-cache --hicache-size]."""
    deterministic: bool = False
    """Obey the seeds of requests [--enable-deterministic-inference]; without it they are refused."""
    tensor_parallel: Count = 1
    """Accelerators that hold one copy of the model [--tp-size]."""
    weights_folder: Path | None = None
    """Where to lay out new weights; a server on another machine must see it under the same path."""
    start_s: Annotated[float, Field(gt=0)] = 900.0
    """Seconds in which a started server must answer."""
    load_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds in which new weights must be in force."""
