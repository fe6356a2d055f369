"""Long traces as several samples, split where one turn of the model ends and the next one begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lehr.core.batch import Sample


def split_samples(samples: Sequence[Sample], max_tokens: int | None) -> tuple[Sample, ...]:
    """Return ``samples``, each divided so that no part has more than ``max_tokens`` from its first token with
    loss to its last, as far as turns allow: a single longer turn stays whole.

    Each part begins with everything that stood before it, without loss, so that every token is trained against
    the very context that it was sampled in; the sum of the parts' token losses is that of the whole. Advantages
    are the whole trace's, which counted once in its group.
    """
    if max_tokens is None:
        return tuple(samples)
    return tuple(part for sample in samples for part in _parts(sample, max_tokens))


def _parts(sample: Sample, max_tokens: int) -> Iterator[Sample]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sample.own, [False]]).astype(np.int8)))
    turns = [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]
    if not turns or turns[-1][1] - turns[0][0] <= max_tokens:
        yield sample
        return
    first, last = turns[0]
    for start, end in turns[1:]:
        if end - first > max_tokens:
            yield _part(sample, first, last)
            first = start
        last = end
    yield _part(sample, first, last)


def _part(sample: Sample, first: int, last: int) -> Sample:
    """Return the tokens before ``last``, with loss from ``first`` on."""
    own = sample.own[:last] & (np.arange(last) >= first)

    def kept(values: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
        return None if values is None else np.where(own, values[:last], np.float32(0))

    return replace(
        sample,
        tokens=sample.tokens[:last],
        own=own,
        logprobs=np.where(own, sample.logprobs[:last], np.float32(0)),
        advantages=np.where(own, sample.advantages[:last], np.float32(0)),
        reference=kept(sample.reference),
        proximal=kept(sample.proximal),
        values=kept(sample.values),
        returns=kept(sample.returns),
    )
