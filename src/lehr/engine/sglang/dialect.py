"""SGLang's native HTTP API: tokens in and out, pausing, weights, prefix cache.

Its log-probabilities are log-softmax(logits / temperature) before top-k and top-p, for greedy requests
log-softmax(logits), unless it runs with ``SGLANG_RETURN_ORIGINAL_LOGPROB``. What was kept by top-k and top-p it
does not tell on every route: such requests are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lehr.core.trace import Completion, Sampling, StopReason, Version
from lehr.engine.base import EngineError, InFlight, Unsupported
from lehr.engine.served.dialect import Gauges, versions_of
from lehr.engine.served.http import Server
from lehr.engine.served.values import whole

_LOWEST_TEMPERATURE = 1e-6
_SCORE_S = 600.0
_PAUSE: dict[InFlight, Literal["in_place", "retract", "abort"]] = {
    "keep": "in_place",
    "recompute": "retract",
    "abort": "abort",
}


class SglangDialect:
    """Implements ``engine.served.dialect.Dialect``. stop_ids: tokens that end a completion."""

    name = "SGLang"

    def __init__(
        self, server: Server, stop_ids: Sequence[int], *, tokenizer: bool, seeds: bool, load_s: float
    ) -> None:
        self._server, self._stop_ids, self._tokenizer = server, list(stop_ids), tokenizer
        self._seeds, self._load_s = seeds, load_s

    def refuse(self, sampling: Sampling) -> None:
        """Refuse what the server would ignore, change, or answer with values that cannot be compared."""
        if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0):
            name = f"top_p={sampling.top_p}" if sampling.top_p < 1 else f"top_k={sampling.top_k}"
            raise Unsupported(
                f"SGLang cannot serve {name}: it does not tell the probability after filtering",
                expected="top_p=1 and top_k=0",
                hint="The native engine gives both values.",
            )
        if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
            raise Unsupported(
                f"SGLang cannot serve temperature={sampling.temperature}: it takes it for 0",
                expected=f"0, or at least {_LOWEST_TEMPERATURE}",
            )
        if sampling.seed is not None and sampling.temperature > 0 and not self._seeds:
            raise Unsupported(
                f"SGLang cannot serve seed={sampling.seed}: it obeys seeds in its deterministic mode only",
                hint="Start it with deterministic = true, or leave the seed out.",
            )
        if any(sampling.stop) and not self._tokenizer:
            raise Unsupported("SGLang cannot serve stop strings: it runs without a tokenizer")

    async def complete(
        self, request_id: str, tokens: Sequence[int], sampling: Sampling, version: Version, timeout_s: float
    ) -> Completion:
        """Return a completion, whose tokens' versions the server tells."""
        settings: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_tokens,
            "stop": [s for s in sampling.stop if s],
            "stop_token_ids": self._stop_ids,
            "skip_special_tokens": False,
        }
        if sampling.seed is not None and self._seeds:
            settings["sampling_seed"] = sampling.seed % 2**63
        body = {
            "rid": request_id,
            "input_ids": list(tokens),
            "sampling_params": settings,
            "return_logprob": True,
            "logprob_start_len": -1,
            "extra_key": str(version),
        }
        answer = await self._server.post("/generate", body, timeout_s=timeout_s)
        about, sampled = answer["meta_info"], answer["output_ids"] or []
        found = [(value, token) for value, token, *_ in about.get("output_token_logprobs") or []]
        if [token for _, token in found] != sampled:
            raise EngineError("SGLang's log-probabilities are not those of its tokens")
        versions = versions_of(about.get("weight_versions") if sampled else [], len(sampled))
        values = [value for value, _ in found]
        cached = about.get("cached_tokens") or 0
        return whole(sampled, values, versions, sampling, _stop(about["finish_reason"]), cached)

    async def score(self, request_id: str, tokens: Sequence[int], temperature: float) -> NDArray[np.float32]:
        """Return float32[T-1]. The server scores prompts at temperature 1 only."""
        if temperature != 1:
            raise Unsupported(f"SGLang cannot score at temperature={temperature}", expected="temperature=1")
        body = {
            "rid": request_id,
            "input_ids": list(tokens),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._server.post("/generate", body, timeout_s=_SCORE_S)
        rows = answer["meta_info"].get("input_token_logprobs") or []
        if [token for _, token, *_ in rows] != list(tokens):
            raise EngineError("SGLang ended a request for scores before it was done")
        return np.array([value for value, *_ in rows[1:]], np.float32)

    async def pause(self) -> None:
        """Freeze requests where they are."""
        await self._server.post("/pause_generation", {"mode": "in_place"})

    async def resume(self) -> None:
        """Go on."""
        await self._server.post("/continue_generation")

    async def load(self, folder: Path, version: Version, in_flight: InFlight, *, busy: bool) -> None:
        """Put the weights of ``folder`` in force and empty the prefix cache, if nobody keeps parts of it."""
        await self._server.post("/pause_generation", {"mode": _PAUSE[in_flight]})
        empty = not (busy and in_flight == "keep")
        body = {"model_path": str(folder), "weight_version": str(version), "flush_cache": empty}
        answer = await self._server.post("/update_weights_from_disk", body, timeout_s=self._load_s)
        if not answer["success"]:
            raise EngineError(f"SGLang did not load {folder}: {answer.get('message')}")
        label = (await self._server.get("/model_info"))["weight_version"]
        if label != str(version):
            raise EngineError(f"SGLang says that it has weights {label!r}", expected=str(version))
        if empty:
            await self.flush()  # the one above is not answered for

    async def flush(self) -> None:
        """Empty the prefix cache. The server refuses while requests run, and says so with an error."""
        await self._server.text("/flush_cache", post=True)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; each is answered with what it has."""
        for request_id in request_ids:
            await self._server.text("/abort_request", post=True, body={"rid": request_id})

    async def gauges(self) -> Gauges:
        """Return what the server says of itself, in tokens: its blocks hold one."""
        loads = (await self._server.get("/v1/loads", include="core"))["loads"]
        return Gauges(
            running=sum(load["num_running_reqs"] for load in loads),
            waiting=sum(load["num_waiting_reqs"] for load in loads),
            held=sum(load["num_used_tokens"] for load in loads),
            total=sum(load["max_total_num_tokens"] for load in loads),
        )

    async def close(self) -> None:
        """Close connections."""
        await self._server.close()


def _stop(reason: dict[str, Any]) -> StopReason:
    match reason["type"], reason.get("matched"):
        case "length", _:
            return "length"
        case "stop", str():
            return "stop"
        case "stop", _:
            return "eos"
        case "abort", _:
            return "abort"
        case kind, _:
            raise EngineError(f"SGLang ended a request with {kind!r}")
