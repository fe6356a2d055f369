"""What vLLM says of itself, in the text format of Prometheus."""

from __future__ import annotations

import re

from lehr.engine.base import EngineError
from lehr.engine.served.dialect import Gauges

_LINE = re.compile(r"^(vllm:[a-z_]+)(\{.*\})? (\S+)$", re.MULTILINE)
_BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')


def gauges(text: str) -> Gauges:
    """Return the sums over the server's engines. One block of each is never allotted and does not count."""
    sums: dict[str, float] = {}
    blocks = engines = 0
    for name, labels, value in _LINE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
        if name == "vllm:cache_config_info" and (found := _BLOCKS.search(labels)):
            blocks += int(found[1]) - 1
        engines += name == "vllm:kv_cache_usage_perc"
    try:
        return Gauges(
            running=int(sums["vllm:num_requests_running"]),
            waiting=int(sums["vllm:num_requests_waiting"]),
            held=round(sums["vllm:kv_cache_usage_perc"] / max(1, engines) * blocks),
            total=blocks,
            steps=int(sums.get("vllm:iteration_tokens_total_count", 0)),
            drafted=int(sums.get("vllm:spec_decode_num_draft_tokens_total", 0)),
            accepted=int(sums.get("vllm:spec_decode_num_accepted_tokens_total", 0)),
        )
    except KeyError as error:
        raise EngineError(
            f"vLLM's metrics lack {error}", expected="those of a server with metrics on"
        ) from error
