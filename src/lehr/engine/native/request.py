"""One request's life: waiting, computing its prompt, decoding, done.

A request owns its tokens and what was recorded with each. Its keys and values can be taken away at any
step (preemption, a weight swap) and are computed again; what it sampled stays.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from lehr.core.errors import LehrError
from lehr.core.trace import Alternatives, Completion, KvPolicy, Sampling, StopReason
from lehr.engine.base import Ranked
from lehr.engine.native.adapters import Adapter
from lehr.engine.native.drafts import DraftSource
from lehr.engine.native.guides import Guide
from lehr.engine.native.rows import Slot
from lehr.engine.native.tiers.prefetch import Load

_KEPT: dict[KvPolicy, KvPolicy] = {
    "exact": "kept_across_versions",
    "quantized": "quantized_kept_across_versions",
    "sparse": "sparse_kept_across_versions",
}


@dataclass(eq=False, slots=True)
class Request:
    """A prompt, what was sampled after it, and where its keys and values lie.

    computed: leading tokens whose keys and values are in ``slot``. blocks: of the pool, in order.
    published: leading blocks that are in the prefix cache, or were found there. chain: their hashes.
    load: what is on its way from a slower tier while it waits. int8: whether keys and values are quantised.
    stretch: the length that its rotary angles depend on (dynamic position scaling), or 0.
    sparse: whether only some keys are seen.
    kept: whether keys and values from before a flush or a weight swap are in use; they are never published.
    ever_kept: whether keys and values of another weight version were in use.
    """

    id: int
    tokens: list[int]
    prompt_length: int
    sampling: Sampling
    seed: int
    session: str = ""
    logprobs: list[float] = field(default_factory=list[float])
    raw_logprobs: list[float] = field(default_factory=list[float])
    kept_mass: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    alternatives: list[Ranked] = field(default_factory=list[Ranked])
    computed: int = 0
    slot: Slot | None = None
    blocks: list[int] = field(default_factory=list[int])
    chain: list[bytes] = field(default_factory=list[bytes])
    published: int = 0
    stretch: int = 0
    sparse: bool = False
    kept: bool = False
    int8: bool = False
    load: Load | None = None
    ever_kept: bool = False
    cached_tokens: int = 0
    drafter: DraftSource | None = None
    guide: Guide | None = None
    adapter: Adapter | None = None
    tail: bytes = b""
    stop: StopReason | None = None
    error: LehrError | None = None
    arrived: float = field(default_factory=time.monotonic)
    started: float = 0.0

    @property
    def own(self) -> int:
        """How many tokens were sampled."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are still to be computed; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def finished(self) -> bool:
        """Whether it has ended, in whatever way."""
        return self.stop is not None or self.error is not None

    @property
    def longest(self) -> int:
        """Length that it can reach."""
        return self.prompt_length + self.sampling.max_tokens

    def completion(self) -> Completion:
        """Return what was sampled. Valid once finished."""
        policy: KvPolicy = "sparse" if self.sparse else "quantized" if self.int8 else "exact"
        if self.ever_kept:
            policy = _KEPT[policy]
        now = time.monotonic()
        started = self.started or now
        return Completion(
            tokens=np.array(self.tokens[self.prompt_length :], dtype=np.int32),
            logprobs=np.array(self.logprobs, dtype=np.float32),
            raw_logprobs=np.array(self.raw_logprobs, dtype=np.float32),
            kept_mass=np.array(self.kept_mass, dtype=np.float32),
            versions=np.array(self.versions, dtype=np.int64),
            stop=self.stop or "abort",
            cached_tokens=self.cached_tokens,
            kv_policy=policy,
            seconds={"queue": started - self.arrived, "generate": now - started},
            alternatives=self._alternatives() if self.sampling.alternatives else None,
        )

    def _alternatives(self) -> Alternatives:
        width = len(self.alternatives[0]) if self.alternatives else 0
        flat = [pair for ranked in self.alternatives for pair in ranked]
        return Alternatives(
            np.array([token for token, _ in flat], np.int32).reshape(-1, width),
            np.array([value for _, value in flat], np.float32).reshape(-1, width),
        )
