"""What a rollout leaves behind: the tokens that were really sent and sampled, and how.

Tokens are the truth. Nothing in a trace is ever decoded and tokenised again on its way to the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lehr.core.errors import Failure

StopReason = Literal["eos", "stop", "length", "abort"]
SpanName = Literal["queue", "generate", "tool", "verify"]
KvPolicy = Literal[
    "exact",
    "kept_across_versions",
    "quantized",
    "quantized_kept_across_versions",
    "sparse",
    "sparse_kept_across_versions",
]
"""How the keys and values that a completion was computed with differ from what its weights give in full
precision: not at all, some are older weights', they were stored in fewer bits, only some were attended to. The
later of two is the less exact."""
ConstraintKind = Literal["json", "schema", "regex", "grammar"]


class Version(NamedTuple):
    """Identity of a set of weights. ``incarnation`` grows with every start of a run, so that a number
    that was used before a crash is never used again. Orders by (incarnation, n).
    """

    incarnation: int
    n: int

    @property
    def packed(self) -> int:
        """The version as one int64, ordered alike."""
        return (self.incarnation << 32) | self.n

    @classmethod
    def unpack(cls, packed: int) -> Version:
        """Invert :attr:`packed`."""
        return cls(packed >> 32, packed & 0xFFFFFFFF)

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.n}"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text of a completion has to be, from its first byte to its last.

    kind: ``json``, any JSON object, without a ``text``; ``schema``, what the JSON Schema in ``text`` admits;
    ``regex``, a whole match of the regular expression; ``grammar``, a context-free grammar in the form of Lark,
    whose first rule is ``start``.
    """

    kind: ConstraintKind
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn.

    temperature: 0 is greedy. top_p, top_k: 1.0 and 0 are off. max_tokens: new tokens at most.
    stop: strings that end the completion (the leftmost wins; they may span tokens).
    seed: the request's own random stream; None draws one.
    constraint: tokens that it does not admit are taken out first, then top_k and top_p keep a part of the rest.
        The end of the sequence is admitted where the text is complete. A completion that ends for another
        reason (``max_tokens``, ``stop``) may be the beginning of an admitted text only.
    alternatives: how many of the likeliest tokens are told at each position.
    adapter: the name of a loaded adapter, which is added to the weights; "" is the model as it is.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    seed: int | None = None
    constraint: Constraint | None = None
    alternatives: int = 0
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The likeliest tokens at each position, the best first: arrays ``[T, K]``, where K is the number that was
    asked for, or the whole vocabulary.

    raw_logprobs: float32, as :attr:`Completion.raw_logprobs`; what is taken out before drawing is among them.
    """

    tokens: NDArray[np.int32]
    raw_logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine returns for one request. Arrays have one entry per new token.

    tokens: int32. The tokens of a stop string or of end-of-sequence are included: they were sampled.
    logprobs: float32, log-probability of each token under the distribution it was drawn from (after
        temperature, constraint, top-k and top-p).
    raw_logprobs: float32, under softmax(logits / temperature) before constraint, top-k and top-p; at
        temperature 0, under softmax(logits).
    kept_mass: float32, probability mass of the set that constraint, top-k and top-p kept (1.0 without any).
    versions: int64, packed :class:`Version` of the weights that produced each token.
    cached_tokens: prompt tokens whose keys and values came from the prefix cache.
    alternatives: where the request asked for them.
    """

    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    raw_logprobs: NDArray[np.float32]
    kept_mass: NDArray[np.float32]
    versions: NDArray[np.int64]
    stop: StopReason
    cached_tokens: int = 0
    kv_policy: KvPolicy = "exact"
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    alternatives: Alternatives | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """One token sequence, prompt and all turns, as the model saw it. Arrays have one entry per token.

    own: True where the model sampled the token; only those are trained on.
    logprobs, raw_logprobs, kept_mass, versions: as in :class:`Completion`; 0, 0, 1 and -1 where not own.
    turns: int32, index of the first token of each completion.
    """

    tokens: NDArray[np.int32]
    own: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    raw_logprobs: NDArray[np.float32]
    kept_mass: NDArray[np.float32]
    versions: NDArray[np.int64]
    turns: NDArray[np.int32]
    sampling: Sampling = field(default_factory=Sampling)
    kv_policy: KvPolicy = "exact"

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class Span:
    """One timed piece of work inside a trace. ``start_s`` counts from the start of the trace."""

    name: SpanName
    start_s: float
    seconds: float
    turn: int = 0
    where: str = ""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one trace, over all its turns."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    own_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Compression:
    """Where a conversation was shortened: what follows is the segment ``segment``.

    turn: number of the next completion. left_out: turns that were removed. tokens_before, tokens_after: of the
    prompt. summary_seed: of the request for a summary, which ends the segment before; None without one.
    """

    segment: int
    turn: int
    left_out: int
    tokens_before: int
    tokens_after: int
    summary_seed: int | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """One attempt at one task. A trace with a ``failure`` is kept and is never trained on.

    A segment grows over turns; compression or a fork starts a new one.
    """

    id: str
    task_id: str
    group_id: str
    attempt: int
    segments: tuple[Segment, ...]
    stop: StopReason = "eos"
    spans: tuple[Span, ...] = ()
    usage: Usage = field(default_factory=Usage)
    failure: Failure | None = None
    compressions: tuple[Compression, ...] = ()

    @property
    def oldest_version(self) -> Version | None:
        """The oldest weights that any token came from, or None when there is no own token."""
        packed = [int(s.versions[s.own].min()) for s in self.segments if s.own.any()]
        return Version.unpack(min(packed)) if packed else None
