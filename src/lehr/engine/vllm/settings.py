"""How a vLLM server runs, readable without vLLM. Names in brackets are the server's own options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from lehr.core.config import Config, Count, Dtype


class SpeculativeConfig(Config):
    """Speculative decoding [--speculative-config]. Changes how many steps a completion takes, never its
    distribution. A draft model keeps the weights that it started with; only its guesses get worse.
    """

    method: Literal["ngram", "suffix", "draft_model", "eagle", "eagle3", "medusa", "mtp"] = "ngram"
    """Where drafts come from."""
    tokens: Count = 4
    """Tokens drafted at most per step [num_speculative_tokens]."""
    model: str | None = None
    """Folder of the draft's weights, for the methods that have some."""
    longest_match: Count | None = None
    """Tokens that a repetition is looked for with at most, for ``ngram`` [prompt_lookup_max]."""
    shortest_match: Count | None = None
    """The same, at least [prompt_lookup_min]."""


class VllmConfig(Config):
    """A server that is started for this run, or with ``url`` one that runs already."""

    type: Literal["vllm"] = "vllm"
    python: Path = Path(".venv-vllm/bin/python")
    """Interpreter of the environment that vLLM is installed in."""
    url: str | None = None
    """Attach to this server instead of starting one. It must run with ``VLLM_SERVER_DEV_MODE=1``,
    ``--enable-scale-out`` and ``--logprobs-mode processed_logprobs``, and serve nobody else."""
    token_variable: str = "LEHR_VLLM_TOKEN"
    """Environment variable that holds the token of the server at ``url``."""
    dtype: Dtype = "auto"
    """Compute dtype [--dtype]; ``auto`` is what the model folder's weights have."""
    length: Count | None = None
    """Tokens of a prompt and its completion together [--max-model-len]; the default is the model's limit."""
    max_running: Count = 64
    """Requests that decode in one step [--max-num-seqs]."""
    token_budget: Count | None = None
    """Tokens per step [--max-num-batched-tokens]."""
    chunked_prefill: bool | None = None
    """Compute long prompts in pieces beside decoding requests [--enable-chunked-prefill]."""
    cache_gib: Annotated[float, Field(gt=0)] | None = None
    """Memory for keys and values [--kv-cache-memory-bytes]; the default is what the server finds free."""
    block_tokens: Count | None = None
    """Tokens per block of the prefix cache [--block-size]. Only whole blocks are found again."""
    kv_dtype: str = "auto"
    """Number format of keys and values [--kv-cache-dtype]. Any but ``auto`` changes the distribution: its
    completions say ``quantized``."""
    offload_gib: Annotated[float, Field(gt=0)] | None = None
    """Main memory for blocks that do not fit the accelerator [--kv-offloading-size]."""
    offload_backend: Literal["native", "lmcache"] = "native"
    """Who moves them [--kv-offloading-backend]."""
    speculative: SpeculativeConfig | None = None
    """Speculative decoding."""
    eager: bool = False
    """Compile nothing: starts faster, runs slower [--enforce-eager]."""
    tensor_parallel: Count = 1
    """Accelerators that hold one copy of the model [--tensor-parallel-size]."""
    transfer: Literal["disk", "nccl"] = "disk"
    """How new weights reach the server: it reads them from disk, or they are sent to its accelerators."""
    weights_folder: Path | None = None
    """Where to lay out new weights; a server on another machine must see it under the same path."""
    start_s: Annotated[float, Field(gt=0)] = 900.0
    """Seconds in which a started server must answer."""
    load_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds in which new weights must be in force."""
