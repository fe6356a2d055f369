"""Computes one request after the other, each by itself, with the sampler of the native engine.

Nothing is batched and nothing is shared: what a request gets depends on no other. Equal seeds give the tokens
that the native engine gives, as far as logits agree.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lehr.core.batch import Manifest
from lehr.core.errors import UnknownName
from lehr.core.trace import Sampling, Version
from lehr.engine.base import EngineError, EngineStats, InFlight, Unsupported
from lehr.engine.bounds import require_newer, require_next, require_servable, require_temperature, token_ids
from lehr.engine.native.cache import BLOCK
from lehr.engine.native.ending import has_ended
from lehr.engine.native.engine import FIRST
from lehr.engine.native.request import Request
from lehr.engine.native.sampler import draw, uniform
from lehr.engine.native.scheduler import blocks_for
from lehr.engine.native.weights import published_file
from lehr.engine.transformers.loading import with_weights
from lehr.engine.transformers.settings import TransformersConfig
from lehr.model.base import Tokenizer
from lehr.model.checkpoint import read_tensors

HONOURED = frozenset({"temperature", "top_p", "top_k", "max_tokens", "stop", "seed"})
"""Fields of ``Sampling`` that are used here; any other must have its default."""
_SCORED = 256


class TransformersCore:
    """Implements ``engine.local.Stepper`` over a causal language model of transformers.

    Room for keys and values is reserved when a request starts, for as long as it may become; what does not fit
    waits in order. There is no prefix cache.
    """

    def __init__(
        self,
        model: Any,
        *,
        vocab_size: int,
        max_positions: int,
        config: TransformersConfig | None = None,
        tokenizer: Tokenizer | None = None,
        stop_ids: Iterable[int] = (),
        version: Version = FIRST,
    ) -> None:
        self.config = config or TransformersConfig()
        self.version = version
        self.dtype: torch.dtype = next(model.parameters()).dtype
        self._model = model
        self._forward_takes = frozenset(inspect.signature(model.forward).parameters)
        self._vocab_size, self._max_positions = vocab_size, max_positions
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._fetched: dict[Version, Any] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._caches: dict[Request, Any] = {}
        self._ids = itertools.count(1)
        self._total = max(1, self.config.cache_tokens // BLOCK)
        self._prompt_tokens = self._own_tokens = self._steps = 0
        self._busy_s = 0.0

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._running and not self._waiting

    def submit(self, tokens: Sequence[int], sampling: Sampling, session: str = "") -> Request:
        """Queue a request and return it. Raises :class:`RequestTooLarge` or :class:`EngineError`."""
        prompt = token_ids(tokens)
        self._check(prompt, sampling)
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        request = Request(next(self._ids), prompt, len(prompt), sampling, seed, session)
        self._prompt_tokens += len(prompt)
        if sampling.max_tokens == 0:
            request.stop = "length"
        else:
            self._waiting.append(request)
        return request

    def _check(self, prompt: list[int], sampling: Sampling) -> None:
        usual = Sampling()
        for field in dataclasses.fields(sampling):
            value = getattr(sampling, field.name)
            if field.name not in HONOURED and value != getattr(usual, field.name):
                raise EngineError(
                    f"the transformers engine cannot sample with {field.name}={value!r}",
                    expected="an option that it has",
                    hint="The native engine may have it.",
                )
        require_servable(
            prompt,
            sampling,
            room=min(self._max_positions, self._total * BLOCK),
            vocab_size=self._vocab_size,
            knows_text=self._tokenizer is not None,
            widen="raise cache_tokens",
        )

    def prepare(self, sampling: Sampling) -> None:
        """Do nothing: what would have to be compiled is refused."""

    def read_adapter(self, folder: Path) -> Any:
        """Raise :class:`Unsupported`: adapters are the native engine's."""
        raise Unsupported(f"the transformers engine takes no adapters; {folder} was not loaded")

    def load_adapter(self, name: str, parts: Any) -> None:
        """Raise :class:`Unsupported`."""
        raise Unsupported(f"the transformers engine takes no adapters; {name!r} was not loaded")

    def unload_adapter(self, name: str) -> None:
        """Raise :class:`UnknownName`: none is loaded."""
        raise UnknownName.among("adapter", name, ())

    def cancel(self, request: Request) -> None:
        """End a request with what it has; its room is free at once. A finished one stays as it is."""
        if not request.finished:
            self._drop(request)
            request.stop = "abort"

    def live(self) -> list[Request]:
        """Return every request that is not finished."""
        return [*self._running, *self._waiting]

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Compute one token of every running request; return those that this finished."""
        started = time.perf_counter()
        self._admit()
        done: list[Request] = []
        for request in list(self._running):
            self._extend(request)
            if has_ended(request, self._stop_ids, self._tokenizer):
                self._drop(request)
                done.append(request)
        self._steps += 1
        self._busy_s += time.perf_counter() - started
        return done

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.config.max_running:
            if self._held() + blocks_for(self._waiting[0].longest) > self._total:
                return
            self._running.append(self._waiting.popleft())

    def _held(self) -> int:
        return sum(blocks_for(request.longest) for request in self._running)

    def _drop(self, request: Request) -> None:
        self._caches.pop(request, None)
        for place in (self._running, self._waiting):
            if request in place:
                place.remove(request)

    def _extend(self, request: Request) -> None:
        """Sample the next token of a request."""
        request.started = request.started or time.monotonic()
        logits_1V = self._last_logits(request)
        drawn = draw(logits_1V, [request.sampling], uniform([request.seed], [request.own]))
        if not math.isfinite(drawn.kept_mass[0]):
            raise EngineError(
                f"the model of version {self.version} gives logits that are not finite",
                expected="weights without NaN and infinity",
                hint="Look at the run's last steps, or take an earlier checkpoint.",
            )
        request.tokens.append(drawn.tokens[0])
        request.logprobs.append(drawn.logprobs[0])
        request.raw_logprobs.append(drawn.raw_logprobs[0])
        request.kept_mass.append(drawn.kept_mass[0])
        request.versions.append(self.version.packed)
        self._own_tokens += 1

    def _last_logits(self, request: Request) -> Tensor:
        """Return the logits after a request's last token, float32 ``[1, V]``."""
        cache = self._caches.get(request)
        start = request.computed if cache is not None else 0
        logits_TV, cache = self._forward(request.tokens[start:], cache, last_only=True)
        if cache is not None:
            self._caches[request] = cache
            request.computed = len(request.tokens)
        return logits_TV[-1:]

    def _forward(self, tokens: list[int], cache: Any, *, last_only: bool) -> tuple[Tensor, Any]:
        """Return the logits of ``tokens``, float32 ``[T, V]`` (of the last only where the model can), and the
        cache with them in it; None where the architecture returns none.
        """
        options: dict[str, Any] = {}
        if last_only and "logits_to_keep" in self._forward_takes:
            options["logits_to_keep"] = 1
        name = "cache" if "cache" in self._forward_takes else "past_key_values"
        if cache is not None:
            options[name] = cache
        out = self._model(input_ids=torch.tensor([tokens]), use_cache=True, **options)
        logits_TV: Tensor = out.logits[0].float()[:, : self._vocab_size]
        return logits_TV.contiguous(), getattr(out, name, None)

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], temperature: float = 1.0) -> NDArray[np.float32]:
        """Return float32[T-1]: log-softmax(logits / temperature) of each token after the first; temperature 0
        counts as 1. Logits exist for a few positions at a time, where the model can go on from a cache.
        """
        require_temperature(temperature)
        ids = token_ids(tokens)
        self._check(ids, Sampling(max_tokens=0))
        parts: list[Tensor] = [torch.zeros(0)]
        cache: Any = None
        given = ids[:-1]
        while given:
            done = len(ids) - 1 - len(given)
            chunk = given[:_SCORED]
            logits_TV, cache = self._forward(chunk, cache, last_only=False)
            if cache is None:
                chunk = given
                logits_TV, _ = self._forward(chunk, None, last_only=False)
            logits_TV /= temperature or 1.0
            next_T1 = torch.tensor(ids[done + 1 : done + 1 + len(chunk)])[:, None]
            parts.append(logits_TV.gather(1, next_T1)[:, 0] - logits_TV.logsumexp(dim=-1))
            given = given[len(chunk) :]
        return torch.cat(parts).numpy()

    def load(self, manifest: Manifest) -> Any:
        """Return a model with published weights for :meth:`offer`. May run in any thread."""
        return with_weights(self._model, read_tensors(published_file(manifest)), self.dtype)

    def offer(self, version: Version, weights: Any, /) -> None:
        """Keep what :meth:`load` returned ready for :meth:`activate`."""
        require_newer(version, self.version)
        self._fetched[version] = weights

    def activate(self, version: Version, in_flight: InFlight = "keep") -> list[Request]:
        """Switch to offered weights; return the requests that this ended. Versions only rise."""
        if version == self.version:
            return []
        require_next(version, self.version, self._fetched)
        ended: list[Request] = []
        for request in list(self._running):
            if in_flight == "abort":
                self.cancel(request)
                ended.append(request)
            elif in_flight == "keep" and request in self._caches:
                request.kept = request.ever_kept = True
            else:
                self._caches.pop(request, None)
                request.computed, request.kept = 0, False
        self._model = self._fetched.pop(version)
        self._fetched = {v: m for v, m in self._fetched.items() if v > version}
        self.version = version
        return ended

    def flush(self) -> None:
        """Nothing is cached across requests."""

    def close(self) -> None:
        """Nothing lies outside."""

    def stats(self) -> EngineStats:
        """Return a snapshot. Nothing is ever cached; what running requests may become is held."""
        held = self._held()
        return EngineStats(
            version=self.version,
            running=len(self._running),
            waiting=len(self._waiting),
            blocks_free=self._total - held,
            blocks_cached=0,
            blocks_held=held,
            blocks_total=self._total,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=0,
            own_tokens=self._own_tokens,
            busy_s=self._busy_s,
            steps=self._steps,
        )
