"""How samples and weights cross between the processes of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from lehr.core.trace import Version

LossName = Literal["sft", "policy_gradient", "preference", "reward", "value"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sequence to train on. Arrays have one entry per token.

    own: tokens that carry loss (never the first). logprobs: float32, as recorded by the sampler, 0 where
    not own. advantages: float32, 0 where not own. temperature: the one that the sampler used.
    prefix: samples with an equal prefix key may start with the same tokens; the trainer computes the
    common part once. raw ids only: nothing is decoded or tokenised again.
    reference: float32, log-probabilities under a frozen reference model, 0 where not own.
    proximal: float32, log-probabilities under the weights before the first of several passes, 0 where not own.
    values, returns: float32, what the critic said of each own token, and what it is to learn.
    pair: samples of one comparison carry one key; ``preferred`` tells which of the two won.
    """

    tokens: NDArray[np.int32]
    own: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    temperature: float = 1.0
    prefix: str = ""
    trace_id: str = ""
    domain: str = ""
    reference: NDArray[np.float32] | None = None
    proximal: NDArray[np.float32] | None = None
    values: NDArray[np.float32] | None = None
    returns: NDArray[np.float32] | None = None
    pair: str = ""
    preferred: bool = True


@dataclass(frozen=True, slots=True)
class Batch:
    """The samples of one optimiser step. One step per batch, however many turns or segments."""

    step: int
    loss: LossName
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """Names a published set of weights and where to find it.

    path: a safetensors file that is complete (it is renamed into place) and immutable.
    digest: blake2b-128 of the file, checked by the reader.
    """

    version: Version
    path: str
    digest: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a trainer reports of one step; ``metrics`` uses the names of ``core.catalogue``."""

    step: int
    metrics: Mapping[str, float]
