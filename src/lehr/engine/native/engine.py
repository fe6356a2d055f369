"""The engine proper: owns the weights, runs steps, hands out what was sampled.

Synchronous and single-threaded: whoever calls :meth:`NativeEngine.step` drives it. ``engine.local`` drives
one from a thread of its own and gives it the asynchronous protocol.
"""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lehr.core.batch import Manifest
from lehr.core.errors import ConfigError
from lehr.core.trace import Sampling, Version
from lehr.engine.base import EngineError, EngineStats, InFlight, TierStats
from lehr.engine.bounds import (
    require_newer,
    require_next,
    require_sampling,
    require_servable,
    require_temperature,
    token_ids,
)
from lehr.engine.native.adapters import Adapters
from lehr.engine.native.attention import Span, StepAttention, lengths
from lehr.engine.native.cache import BLOCK, BlockPool, root
from lehr.engine.native.draft_model import DraftModel
from lehr.engine.native.drafts import Drafter, Width
from lehr.engine.native.ending import has_ended
from lehr.engine.native.fused import FusedForward, short
from lehr.engine.native.guides import Grammars, Guide, Mask
from lehr.engine.native.invariant import tile_rows
from lehr.engine.native.kernels.load import kernels_for
from lehr.engine.native.request import Request
from lehr.engine.native.rows import Rows
from lehr.engine.native.sampler import Drawn, draw_each, uniform
from lehr.engine.native.scheduler import Piece, Scheduler
from lehr.engine.native.scoring import score
from lehr.engine.native.settings import NativeConfig
from lehr.engine.native.sparse import settle
from lehr.engine.native.tiers.prefetch import Prefetcher
from lehr.engine.native.tiers.store import Tiers
from lehr.engine.native.weights import load_published, prepared
from lehr.model.base import Tokenizer
from lehr.model.decoder import Decoder
from lehr.model.lora import LowRank, Place, read_adapter

_SLICE_TOKENS = 320
PAUSE_S = 0.005
"""How long a step with nothing to compute waits for a load: callers are answered between steps."""

FIRST = Version(0, 0)
"""The version of weights that nobody named."""


class NativeEngine:
    """Samples from one decoder. ``decoder`` is taken over: its projections are packed in place.

    stop_ids: tokens that end a completion; none means that only length and stop strings do.
    tokenizer: needed for stop strings only.
    draft: a smaller model that drafts, taken over as well; it needs ``draft_tokens``.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        config: NativeConfig | None = None,
        tokenizer: Tokenizer | None = None,
        stop_ids: Iterable[int] = (),
        version: Version = FIRST,
        draft: Decoder | None = None,
    ) -> None:
        self.config = config or NativeConfig()
        self.model_config = decoder.config
        self.dtype = decoder.embed.weight.dtype
        self.version = version
        self._kernels = kernels_for(self.dtype) if self.config.kernels else None
        invariant = self.config.batch_invariant
        self._use(prepared(decoder, self.config.weights, self._kernels, invariant=invariant))
        self._draft = DraftModel(draft, decoder.config, kernels=self.config.kernels) if draft else None
        self._fetched: dict[Version, Decoder] = {}
        self._adapters = Adapters(tile_rows(self.dtype) if invariant else 0)
        self._tokenizer = tokenizer
        self._stop_ids = frozenset(stop_ids)
        self._grammars = Grammars(tokenizer, self.model_config.vocab_size, self._stop_ids)
        self._int8 = self.config.kv_dtype == "int8"
        kept_in = torch.int8 if self._int8 else self.dtype
        blocks = max(1, self.config.cache_tokens // BLOCK)
        pool = BlockPool(self.model_config, blocks, kept_in)
        self._tiers = self._open_tiers(pool)
        self._scheduler = Scheduler(
            pool,
            Rows(self.model_config, kept_in, self.config.sparse.block if self.config.sparse else 0),
            self._root(version),
            max_running=self.config.max_running,
            token_budget=self.config.token_budget,
            prefetcher=self._tiers,
        )
        self._ids = itertools.count(1)
        self._prompt_tokens = self._cached_tokens = self._own_tokens = self._steps = 0
        self._drafted_tokens = self._accepted_tokens = 0
        self._busy_s = 0.0
        self.computed_tokens = 0

    def _use(self, decoder: Decoder) -> None:
        self._decoder = decoder
        config = self.config
        self._fused = (
            FusedForward(decoder, self._kernels, config.sparse, invariant=config.batch_invariant)
            if self._kernels
            else None
        )

    def _policy(self) -> str:
        if self.config.sparse is not None:
            return f"sparse/{self.config.sparse.digest()}"
        return "quantized" if self._int8 else "exact"

    def _open_tiers(self, pool: BlockPool) -> Prefetcher | None:
        config = self.config
        if not config.tier_memory_bytes and not config.tier_disk_bytes:
            return None
        folder = Path(config.tier_folder).expanduser() if config.tier_folder else None
        if config.tier_disk_bytes and folder is None:
            raise ConfigError(
                f"tier_disk_bytes is {config.tier_disk_bytes}, and tier_folder is not set",
                expected="a folder for the files, on a fast local disk",
            )
        item_bytes = 1 if self._int8 else self.dtype.itemsize
        return Prefetcher(pool, Tiers(config.tier_memory_bytes, config.tier_disk_bytes, folder, item_bytes))

    def _root(self, version: Version) -> bytes:
        return root(version, self.dtype, self._policy())

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._scheduler.running and not self._scheduler.waiting

    def prepare(self, sampling: Sampling) -> None:
        """Compile what ``sampling`` needs, so that :meth:`submit` finds it. May run in any thread."""
        require_sampling(sampling)
        if sampling.constraint is not None:
            self._grammars.guide(sampling.constraint)

    def submit(self, tokens: Sequence[int], sampling: Sampling, session: str = "") -> Request:
        """Queue a request and return it. Raises :class:`RequestTooLarge` or :class:`EngineError`."""
        prompt = token_ids(tokens)
        self._check(prompt, sampling)
        seed = secrets.randbits(63) if sampling.seed is None else int(sampling.seed)
        request = Request(next(self._ids), prompt, len(prompt), sampling, seed, session, int8=self._int8)
        if self._decoder.rotary.depends_on(request.longest - 1):  # the last token is never computed
            request.stretch = request.longest - 1
        request.sparse = self.config.sparse is not None
        if sampling.adapter:
            request.adapter = self._adapters.get(sampling.adapter)
        if sampling.constraint is not None:
            request.guide = self._grammars.guide(sampling.constraint)
        if self.config.draft_tokens:
            most = self.config.draft_tokens
            if self._draft:
                request.drafter = self._draft.source(request, most)
            else:
                request.drafter = Drafter(request.tokens, Width(most))
        self._prompt_tokens += len(prompt)
        if sampling.max_tokens == 0:
            request.stop = "length"
        else:
            self._scheduler.add(request)
        return request

    def _check(self, prompt: list[int], sampling: Sampling) -> None:
        require_servable(
            prompt,
            sampling,
            room=min(self.model_config.max_positions, self._scheduler.pool.total * BLOCK),
            vocab_size=self.model_config.vocab_size,
            knows_text=self._tokenizer is not None,
            widen="raise cache_tokens",
        )

    @torch.inference_mode()
    def cancel(self, request: Request) -> None:
        """End a request with what it has; its blocks are free at once. A finished one stays as it is."""
        if not request.finished:
            self._drop(request)
            request.stop = "abort"

    def _drop(self, request: Request) -> None:
        self._scheduler.drop(request)
        if request.drafter:
            request.drafter.close()

    def live(self) -> list[Request]:
        """Return every request that is not finished."""
        return [*self._scheduler.running, *self._scheduler.waiting]

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Compute one step and return the requests that it finished."""
        started = time.perf_counter()
        pieces = self._scheduler.plan()
        if not pieces:
            if self._tiers is not None:
                self._tiers.wait(PAUSE_S)
            return []
        pieces = _in_row_order(pieces)
        done = self._finish(pieces, self._forward(pieces))
        self._steps += 1
        self.computed_tokens += sum(p.rows for p in pieces)
        spent = time.perf_counter() - started
        self._busy_s += spent
        self._measure(pieces, spent)
        pool = self._scheduler.pool
        if pool.free + pool.cached + pool.held != pool.total:
            raise EngineError(
                f"{pool.free} free, {pool.cached} cached and {pool.held} held blocks",
                expected=f"{pool.total} in all",
            )
        return done

    def _measure(self, pieces: list[Piece], seconds: float) -> None:
        """Note how fast prompts are computed, in steps that do little else."""
        prompts = sum(p.count for p in pieces if p.count > 1)
        if self._tiers is not None and prompts > max(BLOCK, sum(p.rows for p in pieces) // 2):
            self._tiers.choice.compute.note(prompts, seconds)

    def _forward(self, pieces: list[Piece]) -> torch.Tensor:
        """Compute the pieces; return the hidden states of each one's last token and its draft, ``[N, D]``."""
        parts: list[torch.Tensor] = []
        for some in _slices(pieces):
            parts.append(self._forward_slice(some))
        self._adapters.end()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _forward_slice(self, pieces: list[Piece]) -> torch.Tensor:
        tokens: list[int] = []
        spans: list[Span] = []
        for piece in pieces:
            request, start = piece.request, piece.request.computed
            if request.slot is None:
                raise EngineError(f"request {request.id} was planned without a row")
            request.started = request.started or time.monotonic()
            spans.append(Span(request.slot, start, piece.rows, len(tokens), request.stretch))
            tokens.extend(request.tokens[start : start + piece.count])
            tokens.extend(piece.draft)
        self._adapters.begin(
            self._decoder,
            [(p.request.adapter, s.offset, s.offset + s.count) for p, s in zip(pieces, spans, strict=True)],
        )
        singles = sum(1 for p in pieces if p.rows == 1)
        if self._fused:
            hidden_TD = self._fused.hidden(tokens, spans)
        else:
            positions = [position for s in spans for position in range(s.start, s.start + s.count)]
            attention = StepAttention(spans[:singles], spans[singles:], self.dtype, self.config.sparse)
            hidden_TD = self._decoder.hidden(
                torch.tensor(tokens), torch.tensor(positions), attention, lengths(spans)
            )
        if self.config.sparse:
            settle(spans, self.config.sparse.block)
        if singles == len(spans):
            return hidden_TD
        wanted = [
            row
            for piece, span in zip(pieces, spans, strict=True)
            for row in range(span.offset + piece.count - 1, span.offset + piece.rows)
        ]
        return hidden_TD if len(wanted) == len(tokens) else hidden_TD[torch.tensor(wanted)]

    def _finish(self, pieces: list[Piece], last_ND: torch.Tensor) -> list[Request]:
        """Draw where a prompt or a token is complete, and end the requests that are done."""
        ready: list[Piece] = []
        rows: list[int] = []
        row = 0
        for piece in pieces:
            if piece.count == piece.request.remaining:
                ready.append(piece)
                rows.extend(range(row, row + 1 + len(piece.draft)))
            row += 1 + len(piece.draft)
        for piece in pieces:
            piece.request.computed += piece.count
            self._publish(piece.request)
        if not ready:
            return []
        mask = self._mask(ready)
        drawn = self._draw(last_ND if len(rows) == row else last_ND[rows], ready, mask)
        done: list[Request] = []
        first = 0
        for piece in ready:
            count = 1 + len(piece.draft)
            if not all(map(math.isfinite, drawn.kept_mass[first : first + count])):
                self._refuse_values(piece.request)
                done.append(piece.request)
                first += count
                continue
            if piece.request.own == 0:
                self._cached_tokens += piece.request.cached_tokens
            if self._take(piece, drawn, first, mask.dead if mask else frozenset()):
                done.append(piece.request)
            first += count
        for request in reversed(done):  # the last row first: then no row moves into a place that is freed next
            self._drop(request)
        return done

    def _refuse_values(self, request: Request) -> None:
        """End a request whose logits are not finite because of its adapter. Raises where it has none: then the
        weights are at fault, and every request would end so.
        """
        if request.adapter is None:
            raise EngineError(
                f"the model of version {self.version} gives logits that are not finite",
                expected="weights without NaN and infinity",
                hint="Look at the run's last steps, or take an earlier checkpoint.",
            )
        request.error = EngineError(
            f"the adapter {request.adapter.name!r} gives logits that are not finite",
            expected="an adapter whose products fit the compute dtype",
            hint="Take an earlier checkpoint of it, or a smaller lora_alpha.",
        )

    def _mask(self, ready: list[Piece]) -> Mask | None:
        """Return what the rows of the requests with a constraint may draw; None where there are none."""
        guided: list[tuple[int, Guide, Sequence[int]]] = []
        first = 0
        for piece in ready:
            request = piece.request
            if request.guide is not None:
                request.guide.follow(request.tokens, request.prompt_length)
                guided.append((first, request.guide, piece.draft))
            first += 1 + len(piece.draft)
        return self._grammars.mask(guided) if guided else None

    def _take(self, piece: Piece, drawn: Drawn, first: int, dead: Collection[int]) -> bool:
        """Append what was drawn for a piece, as far as its draft was right and what it says may be said. Return
        whether the request ends.
        """
        request = piece.request
        packed = self.version.packed
        taken, ends = 0, False
        for row in range(first, first + 1 + len(piece.draft)):
            if row in dead and request.guide is not None:
                request.guide.follow(request.tokens, request.prompt_length)
                request.error = request.guide.why_dead()
                return True
            request.tokens.append(drawn.tokens[row])
            request.logprobs.append(drawn.logprobs[row])
            request.raw_logprobs.append(drawn.raw_logprobs[row])
            request.kept_mass.append(drawn.kept_mass[row])
            request.versions.append(packed)
            if row in drawn.alternatives:
                request.alternatives.append(drawn.alternatives[row])
            taken += 1
            ends = has_ended(request, self._stop_ids, self._tokenizer)
            if ends or row == first + len(piece.draft) or drawn.tokens[row] != piece.draft[row - first]:
                break
            request.computed += 1
        self._own_tokens += taken
        if piece.draft and request.drafter:
            self._drafted_tokens += len(piece.draft)
            self._accepted_tokens += taken - 1
            request.drafter.learn(len(piece.draft), taken - 1)
            if not ends:
                self._scheduler.publish(request)
        return ends

    def _draw(self, last_ND: torch.Tensor, ready: list[Piece], mask: Mask | None) -> Drawn:
        """Draw a token from each hidden state: of each piece, one after its last token and its draft's."""
        seeds: list[int] = []
        positions: list[int] = []
        settings: list[Sampling] = []
        for piece in ready:
            request, count = piece.request, 1 + len(piece.draft)
            seeds += [request.seed] * count
            positions += range(request.own, request.own + count)
            settings += [request.sampling] * count
        where = uniform(seeds, positions)
        logits_NV = self._decoder.head(last_ND)
        return draw_each(self._kernels, logits_NV, settings, where, mask, alone=self.config.batch_invariant)

    def _publish(self, request: Request) -> None:
        if request.computed == request.prompt_length or request.computed % BLOCK == 0 or request.remaining:
            self._scheduler.publish(request)

    def load(self, manifest: Manifest) -> Decoder:
        """Return published weights for :meth:`offer`. Takes a while; may run in any thread."""
        c = self.config
        return load_published(
            manifest, self.model_config, self.dtype, c.weights, self._kernels, invariant=c.batch_invariant
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that are loaded."""
        return self._adapters.names

    def read_adapter(self, folder: Path) -> Mapping[Place, LowRank]:
        """Return the adapter in ``folder`` for :meth:`load_adapter`. May run in any thread."""
        return read_adapter(folder, self.model_config, self.dtype)

    def load_adapter(self, name: str, parts: Mapping[Place, LowRank]) -> None:
        """Serve requests that name it from now on; what was loaded under the name serves those that run."""
        self._adapters.load(name, parts)

    def unload_adapter(self, name: str) -> None:
        """Refuse requests that name it from now on; those that run go on. Raises :class:`UnknownName`."""
        self._adapters.unload(name)

    def offer(self, version: Version, decoder: Decoder) -> None:
        """Keep weights, from :func:`~lehr.engine.native.weights.prepared`, ready for :meth:`activate`."""
        require_newer(version, self.version)
        self._fetched[version] = decoder

    @torch.inference_mode()
    def activate(self, version: Version, in_flight: InFlight = "keep") -> list[Request]:
        """Switch to offered weights; return the requests that this ended. Versions only rise."""
        if version == self.version:
            return []
        require_next(version, self.version, self._fetched)
        ended: list[Request] = []
        for request in self._scheduler.running[::-1]:
            if in_flight == "abort":
                self.cancel(request)
                ended.append(request)
            elif in_flight == "recompute" or request.own == 0:
                self._scheduler.send_back(request)
            else:
                request.kept = request.ever_kept = True
        self._use(self._fetched.pop(version))
        self._fetched = {v: d for v, d in self._fetched.items() if v > version}
        self.version = version
        self._scheduler.restart(self._root(version))
        return ended

    def flush(self) -> None:
        """Forget every cached prefix. What running requests computed before is not cached afterwards either."""
        for request in self._scheduler.running:
            request.kept = True
        self._scheduler.restart(self._scheduler.seed)

    def score(self, tokens: Sequence[int], temperature: float = 1.0) -> NDArray[np.float32]:
        """Return float32[T-1], the log-probability of each token after the first."""
        require_temperature(temperature)
        prompt = token_ids(tokens)
        self._check(prompt, Sampling(max_tokens=0))
        return score(self._decoder, prompt, temperature)

    def stats(self) -> EngineStats:
        """Return a snapshot."""
        s = self._scheduler
        if self._tiers is not None:
            self._tiers.settle()
        return EngineStats(
            version=self.version,
            running=len(s.running),
            waiting=len(s.waiting),
            blocks_free=s.pool.free,
            blocks_cached=s.pool.cached,
            blocks_held=s.pool.held,
            blocks_total=s.pool.total,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            own_tokens=self._own_tokens,
            busy_s=self._busy_s,
            steps=self._steps,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            tiers=self._tiers.stats() if self._tiers is not None else TierStats(),
        )

    def close(self) -> None:
        """End the threads of the slower tiers and remove their files. Idempotent."""
        if self._tiers is not None:
            self._tiers.close()


def _slices(pieces: list[Piece]) -> list[list[Piece]]:
    """Split a step's pieces into forwards whose activations stay in the processor's caches. Single tokens,
    which are few, stay together.
    """
    slices: list[list[Piece]] = [[]]
    tokens = 0
    for piece in pieces:
        if slices[-1] and piece.rows > 1 and tokens + piece.rows > _SLICE_TOKENS:
            slices.append([])
            tokens = 0
        slices[-1].append(piece)
        tokens += piece.rows
    return slices


def _in_row_order(pieces: list[Piece]) -> list[Piece]:
    """Return single tokens first, lane by lane in the order of their rows, then short chunks, then others."""

    def place(piece: Piece) -> tuple[int, int, int]:
        slot = piece.request.slot
        if slot is None or piece.rows > 1:
            return (1 if short(piece.request.computed, piece.rows) else 2, 0, 0)
        return (0, slot.lane.capacity, slot.row)

    return sorted(pieces, key=place)
