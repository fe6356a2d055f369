"""Starts a vLLM server or attaches to one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lehr.core.trace import Version
from lehr.engine.base import EngineError
from lehr.engine.served.dialect import Limits, parsed
from lehr.engine.served.engine import ServedEngine
from lehr.engine.served.folders import Fetched
from lehr.engine.served.http import Server
from lehr.engine.served.launch import FIRST, UNNAMED, has_tokenizer, stop_ids, stored_dtype, token_of
from lehr.engine.served.process import Command, ServerProcess, flags
from lehr.engine.vllm.dialect import VllmDialect
from lehr.engine.vllm.settings import VllmConfig
from lehr.engine.vllm.transfer import INSIDE, FromDisk, OverNccl
from lehr.model.checkpoint import load_config
from lehr.model.config import ModelConfig

_INSTALL = "make test-vllm (a CPU), or: python -m venv .venv-vllm && .venv-vllm/bin/pip install vllm==0.32.0"
_GIB = 2**30
_EXTENSION = "lehr_workers.Reload"
_EXACT = ("auto", "bfloat16", "float16", "float32")


async def open_vllm(
    folder: Path, config: VllmConfig | None = None, version: Version = FIRST, log: Path | None = None
) -> ServedEngine:
    """Return an engine on the model in ``folder``; the server is its own to end, or the one at ``config.url``.

    version: of the weights in ``folder``. A server that was attached to before knows its own.
    """
    config = config or VllmConfig()
    model = load_config(folder)
    process = None
    if config.url is None:
        process = ServerProcess("vLLM", command(folder, config), log)
        server = Server("vLLM", process.url, process.token)
    else:
        server = Server("vLLM", config.url, token_of(config.url, config.token_variable))
    try:
        if process is not None:
            await process.ready(lambda: server.text("/health", timeout_s=5), config.start_s)
        info = (await server.get("/server_info", config_format="json"))["vllm_config"]
        method = _reloading(info, model)
        version = await _labelled(server, version)
        length = (await server.get("/v1/models"))["data"][0]["max_model_len"]
    except BaseException:
        await server.close()
        if process is not None:
            await process.end()
        raise
    transfer = FromDisk(method, config.load_s)
    if config.transfer == "nccl":
        transfer = OverNccl(config.python, server.token, config.tensor_parallel, config.load_s)
    dialect = VllmDialect(
        server,
        transfer,
        stop_ids(folder),
        tokenizer=not info["model_config"]["skip_tokenizer_init"],
        offload=info["cache_config"]["kv_offloading_size"] is not None,
    )
    return ServedEngine(
        dialect,
        Limits(length, model.vocab_size),
        Fetched(folder, config.weights_folder),
        version,
        lossy=info["cache_config"]["cache_dtype"] not in _EXACT,
        process=process,
    )


def command(folder: Path, config: VllmConfig) -> Command:
    """Return what starts a server as ``config`` says."""
    options: dict[str, object] = {
        "model": folder.resolve(),
        "dtype": stored_dtype(folder) if config.dtype == "auto" else config.dtype,
        "max-model-len": config.length,
        "max-num-seqs": config.max_running,
        "max-num-batched-tokens": config.token_budget,
        "enable-chunked-prefill": config.chunked_prefill,
        "enable-prefix-caching": True,
        "block-size": config.block_tokens,
        "kv-cache-dtype": config.kv_dtype,
        "kv-cache-memory-bytes": round(config.cache_gib * _GIB) if config.cache_gib else None,
        "kv-offloading-size": config.offload_gib,
        "kv-offloading-backend": config.offload_backend if config.offload_gib else None,
        "speculative-config": _speculative(config),
        "enforce-eager": config.eager or None,
        "tensor-parallel-size": config.tensor_parallel,
        "weight-transfer-config": '{"backend": "nccl"}' if config.transfer == "nccl" else None,
        "skip-tokenizer-init": None if has_tokenizer(folder) else True,
        "generation-config": "vllm",
        "logprobs-mode": "processed_logprobs",
        "enable-scale-out": True,
        "enable-prompt-tokens-details": True,
        "middleware": "guard.TokenGuard",
        "worker-extension-cls": _EXTENSION,
    }
    environment = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(INSIDE),
    }
    python = config.python if config.python.is_absolute() else Path.cwd() / config.python
    arguments = tuple(flags(options))
    return Command(python, "vllm.entrypoints.openai.api_server", arguments, environment, _INSTALL)


def _speculative(config: VllmConfig) -> str | None:
    wanted = config.speculative
    if wanted is None:
        return None
    values: dict[str, Any] = {
        "method": wanted.method,
        "num_speculative_tokens": wanted.tokens,
        "model": wanted.model,
        "prompt_lookup_max": wanted.longest_match,
        "prompt_lookup_min": wanted.shortest_match,
    }
    return json.dumps({name: value for name, value in values.items() if value is not None})


def _reloading(info: dict[str, Any], model: ModelConfig) -> str:
    """Return the workers' method that reloads weights, or raise if the server is not set up as it must be."""
    mode = info["model_config"]["logprobs_mode"]
    if mode != "processed_logprobs":
        raise EngineError(
            f"the server was started with --logprobs-mode {mode}",
            expected="processed_logprobs",
            hint="Start it again; log-probabilities before temperature cannot be converted.",
        )
    if info["parallel_config"]["worker_extension_cls"] == _EXTENSION:
        return "lehr_reload"
    if info["device_config"]["device_type"] == "cpu" and model.tied_head:
        raise EngineError(
            "a vLLM server on a CPU keeps the old head of a model whose head is tied to its embedding",
            expected=f"it to run with --worker-extension-cls {_EXTENSION} and PYTHONPATH={INSIDE}",
        )
    return "reload_weights"


async def _labelled(server: Server, version: Version) -> Version:
    """Return the version that the server names, having named its weights ``version`` if they had no name."""
    label = (await server.get("/weight_info"))["weight_version"]
    if label != UNNAMED:
        return parsed(label)
    await server.post("/update_weight_version", {"new_version": str(version)})
    return version
