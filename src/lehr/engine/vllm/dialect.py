"""vLLM's own HTTP API: tokens in and out, pausing, weights, prefix cache. Read in the source of release 0.32.

The server must report log-probabilities after temperature (``--logprobs-mode processed_logprobs``): without
top-k and top-p they are log-softmax(logits / temperature), for greedy requests log-softmax(logits). With
either they are renormalised over the kept set, whose mass the server does not tell: such requests are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lehr.core.trace import Completion, Sampling, StopReason, Version
from lehr.engine.base import EngineError, InFlight, Unsupported
from lehr.engine.served.dialect import Gauges, versions_of
from lehr.engine.served.http import Server
from lehr.engine.served.values import whole
from lehr.engine.vllm.metrics import gauges
from lehr.engine.vllm.transfer import Transfer

_LOWEST_TEMPERATURE = 0.01
_SCORE_S = 600.0
_ID_PREFIX = "generate-tokens-"


class VllmDialect:
    """Implements ``engine.served.dialect.Dialect``. stop_ids: tokens that end a completion."""

    name = "vLLM"

    def __init__(
        self, server: Server, transfer: Transfer, stop_ids: Sequence[int], *, tokenizer: bool, offload: bool
    ) -> None:
        self._server, self._transfer, self._stop_ids = server, transfer, list(stop_ids)
        self._tokenizer, self._offload = tokenizer, offload

    def refuse(self, sampling: Sampling) -> None:
        """Refuse what the server would ignore, change, or answer with values that cannot be compared."""
        if sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0):
            name = f"top_p={sampling.top_p}" if sampling.top_p < 1 else f"top_k={sampling.top_k}"
            raise Unsupported(
                f"vLLM cannot serve {name}: it does not tell the probability before filtering",
                expected="top_p=1 and top_k=0",
                hint="The native engine gives both values.",
            )
        if 0 < sampling.temperature < _LOWEST_TEMPERATURE:
            raise Unsupported(
                f"vLLM cannot serve temperature={sampling.temperature}: it samples with {_LOWEST_TEMPERATURE}",
                expected=f"0, or at least {_LOWEST_TEMPERATURE}",
            )
        if any(sampling.stop) and not self._tokenizer:
            raise Unsupported(
                "vLLM cannot serve stop strings for this model, whose folder has no tokenizer.json",
                hint="The native engine looks for them itself.",
            )

    async def complete(
        self, request_id: str, tokens: Sequence[int], sampling: Sampling, version: Version, timeout_s: float
    ) -> Completion:
        """Return a completion, whose tokens' versions the server tells."""
        settings: dict[str, Any] = {
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_tokens,
            "seed": None if sampling.seed is None else sampling.seed % 2**63,
            "stop": [s for s in sampling.stop if s],
            "stop_token_ids": self._stop_ids,
            "logprobs": 0,
            "detokenize": any(sampling.stop),
            "skip_special_tokens": False,
        }
        answer = await self._ask(request_id, tokens, settings, str(version), timeout_s)
        choice = answer["choices"][0]
        sampled: list[int] = choice["token_ids"] or []
        values = [entry["logprob"] for entry in (choice["logprobs"] or {}).get("content") or []]
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        versions = versions_of(choice["weight_versions"], len(sampled))
        return whole(sampled, values, versions, sampling, _stop(choice), cached)

    async def score(self, request_id: str, tokens: Sequence[int], temperature: float) -> NDArray[np.float32]:
        """Return float32[T-1]. The server scores prompts at temperature 1 only, and never from its cache."""
        if temperature != 1:
            raise Unsupported(f"vLLM cannot score at temperature={temperature}", expected="temperature=1")
        settings = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        answer = await self._ask(request_id, tokens, settings, None, _SCORE_S)
        rows: list[dict[str, Any] | None] | None = answer["prompt_logprobs"]
        if rows is None or len(rows) != len(tokens):
            raise EngineError("vLLM ended a request for scores before it was done")
        found = [(row or {}).get(str(token)) for token, row in zip(tokens[1:], rows[1:], strict=True)]
        if not all(found):
            raise EngineError("vLLM's scores lack tokens of the prompt")
        return np.array([entry["logprob"] for entry in found if entry], np.float32)

    async def pause(self) -> None:
        """Freeze requests where they are."""
        await self._server.post("/pause", mode="keep", clear_cache=False)
        if not (await self._server.get("/is_paused"))["is_paused"]:
            raise EngineError("vLLM took a pause and does not pause")

    async def resume(self) -> None:
        """Go on."""
        await self._server.post("/resume")

    async def load(self, folder: Path, version: Version, in_flight: InFlight, *, busy: bool) -> None:
        """Put the weights of ``folder`` in force, and empty the prefix cache, which the server does not do."""
        await self._server.post("/pause", mode="abort" if in_flight == "abort" else "keep", clear_cache=False)
        await self._transfer.send(self._server, folder)
        await self._server.post("/update_weight_version", {"new_version": str(version)})
        label = (await self._server.get("/weight_info"))["weight_version"]
        if label != str(version):
            raise EngineError(f"vLLM says that it has weights {label!r}", expected=str(version))
        empty = await self._reset(running=in_flight == "recompute")
        if not empty and not (busy and in_flight == "keep"):
            raise EngineError(f"vLLM did not empty its prefix cache for weights {version}")

    async def flush(self) -> None:
        """Empty the prefix cache. The server can not while requests hold blocks of it."""
        if not await self._reset(running=False):
            raise EngineError(
                "vLLM did not empty its prefix cache, because requests hold blocks of it",
                hint="Wait for them or abort them first.",
            )

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; each is answered with what it has."""
        await self._server.post("/abort_requests", {"request_ids": [_ID_PREFIX + i for i in request_ids]})

    async def gauges(self) -> Gauges:
        """Return what the server says of itself."""
        return gauges(await self._server.text("/metrics"))

    async def close(self) -> None:
        """Close connections."""
        await self._server.close()

    async def _ask(
        self,
        request_id: str,
        tokens: Sequence[int],
        settings: dict[str, Any],
        salt: str | None,
        timeout_s: float,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "request_id": request_id,
            "token_ids": list(tokens),
            "sampling_params": settings,
            "cache_salt": salt,
        }
        return await self._server.post("/inference/v1/generate", body, timeout_s=timeout_s)

    async def _reset(self, *, running: bool) -> bool:
        answer = await self._server.post(
            "/reset_prefix_cache", reset_running_requests=running, reset_external=self._offload
        )
        return bool(answer["success"])


def _stop(choice: dict[str, Any]) -> StopReason:
    match choice["finish_reason"], choice["stop_reason"]:
        case "length", _:
            return "length"
        case "stop", str():
            return "stop"
        case "stop", _:
            return "eos"
        case "abort", _:
            return "abort"
        case reason, _:
            raise EngineError(f"vLLM ended a request with {reason!r}")
