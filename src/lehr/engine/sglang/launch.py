"""Starts an SGLang server or attaches to one."""

from __future__ import annotations

from pathlib import Path

from lehr.core.trace import Version
from lehr.engine.served.dialect import Limits, parsed
from lehr.engine.served.engine import ServedEngine
from lehr.engine.served.folders import Fetched
from lehr.engine.served.http import Server
from lehr.engine.served.launch import FIRST, UNNAMED, has_tokenizer, stop_ids, stored_dtype, token_of
from lehr.engine.served.process import Command, ServerProcess, flags
from lehr.engine.sglang.dialect import SglangDialect
from lehr.engine.sglang.settings import SglangConfig
from lehr.model.checkpoint import load_config

_INSTALL = "python -m venv .venv-sglang && .venv-sglang/bin/pip install sglang==0.5.23"


async def open_sglang(
    folder: Path, config: SglangConfig | None = None, version: Version = FIRST, log: Path | None = None
) -> ServedEngine:
    """Return an engine on the model in ``folder``; the server is its own to end, or the one at ``config.url``.

    version: of the weights in ``folder``. A server that was attached to before knows its own.
    """
    config = config or SglangConfig()
    process = None
    if config.url is None:
        process = ServerProcess("SGLang", command(folder, config), log)
        server = Server("SGLang", process.url, process.token)
    else:
        server = Server("SGLang", config.url, token_of(config.url, config.token_variable))
    try:
        if process is not None:
            await process.ready(lambda: server.text("/health", timeout_s=5), config.start_s)
        info = await server.get("/server_info")
        version = await _labelled(server, version)
    except BaseException:
        await server.close()
        if process is not None:
            await process.end()
        raise
    model = load_config(folder)
    dialect = SglangDialect(
        server,
        stop_ids(folder),
        tokenizer=not info.get("skip_tokenizer_init", False),
        seeds=bool(info.get("enable_deterministic_inference", False)),
        load_s=config.load_s,
    )
    return ServedEngine(
        dialect,
        Limits(info.get("context_length") or model.max_positions, model.vocab_size),
        Fetched(folder, config.weights_folder),
        version,
        lossy=info.get("kv_cache_dtype", config.kv_dtype) not in ("auto", "bfloat16", "float32"),
        process=process,
    )


def command(folder: Path, config: SglangConfig) -> Command:
    """Return what starts a server as ``config`` says."""
    options: dict[str, object] = {
        "model-path": folder.resolve(),
        "dtype": stored_dtype(folder) if config.dtype == "auto" else config.dtype,
        "context-length": config.length,
        "max-running-requests": config.max_running,
        "chunked-prefill-size": config.chunk_tokens,
        "mem-fraction-static": config.memory_fraction,
        "kv-cache-dtype": config.kv_dtype,
        "enable-hierarchical-cache": True if config.offload_gib else None,
        "hicache-size": config.offload_gib,
        "enable-deterministic-inference": config.deterministic or None,
        "tp-size": config.tensor_parallel,
        "skip-tokenizer-init": None if has_tokenizer(folder) else True,
        "sampling-defaults": "openai",
    }
    environment = {"HF_HUB_OFFLINE": "1", "LEHR_TOKEN_FLAG": "--api-key"}
    python = config.python if config.python.is_absolute() else Path.cwd() / config.python
    return Command(python, "sglang.launch_server", tuple(flags(options)), environment, _INSTALL)


async def _labelled(server: Server, version: Version) -> Version:
    """Return the version that the server names, having named its weights ``version`` if they had no name."""
    label = (await server.get("/model_info"))["weight_version"]
    if label != UNNAMED:
        return parsed(label)
    await server.post("/update_weight_version", {"new_version": str(version)})
    return version
