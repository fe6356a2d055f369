"""Drawing tokens from logits, all requests at once, in float32.

A token is drawn by inverse transform: one uniform number per row, a search over the sums of vocabulary
blocks, then one inside the block. Sorting happens only in rows that ask for top-k or top-p. The uniform
number is a function of the request's seed and the position, so that neither the rest of the batch nor
preemption changes what is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from lehr.core.trace import Sampling
from lehr.engine.base import Ranked
from lehr.engine.native.guides import Mask
from lehr.engine.native.kernels.load import Kernels

_WIDTH = 256
_SHORTLIST = 1024


@dataclass(frozen=True, slots=True)
class Drawn:
    """One entry per row, as in ``core.trace.Completion``. alternatives: of the rows that asked for them."""

    tokens: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    kept_mass: list[float]
    alternatives: dict[int, Ranked] = field(default_factory=dict[int, Ranked])


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.float64]:
    """Return a number in [0, 1) per row: SplitMix64 (Steele et al. 2014) of seed and position."""
    with np.errstate(over="ignore"):
        state = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], np.uint64)
        state = _mix(state + np.uint64(0x9E3779B97F4A7C15))
        state = _mix(state + np.array(positions, np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw_each(
    kernels: Kernels | None,
    logits_NV: Tensor,
    settings: Sequence[Sampling],
    where: NDArray[np.float64],
    mask: Mask | None = None,
    *,
    alone: bool = False,
) -> Drawn:
    """Draw one token per row from float32 logits, which may be overwritten: in one pass of a kernel where a row
    draws from the whole distribution, by :func:`draw` otherwise. ``alone``: with one row at a time there,
    so that sums do not depend on how many there are.
    """
    alternatives = likeliest(logits_NV, settings)
    masked = set(mask.rows) if mask else set[int]()
    partly = [i for i, s in enumerate(settings) if kernels is None or filters(s) or i in masked]
    if alone and len(settings) > 1 and partly:
        rows = [slice(i, i + 1) for i in range(len(settings))]
        each = [
            ([i], draw_each(kernels, logits_NV[r], settings[r], where[r], mask.of(i) if mask else None))
            for i, r in enumerate(rows)
        ]
        drawn = _merged(each, len(settings))
    elif kernels is None or len(partly) == len(settings):
        drawn = draw(logits_NV, settings, where, mask)
    elif not partly:
        drawn = draw_whole(kernels, logits_NV, settings, where)
    else:
        place = {row: i for i, row in enumerate(partly)}
        moved = mask and Mask([place[r] for r in mask.rows], mask.allowed_MV, mask.dead)
        wholly = [i for i in range(len(settings)) if i not in place]
        parts = (
            (partly, draw(logits_NV[partly], [settings[i] for i in partly], where[partly], moved)),
            (wholly, draw_whole(kernels, logits_NV[wholly], [settings[i] for i in wholly], where[wholly])),
        )
        drawn = _merged(parts, len(settings))
    drawn.alternatives.update(alternatives)
    return drawn


def likeliest(logits_NV: Tensor, settings: Sequence[Sampling]) -> dict[int, Ranked]:
    """Return the alternatives of each row that asks for them, as ``core.trace.Alternatives`` has them."""
    found: dict[int, Ranked] = {}
    for row, sampling in enumerate(settings):
        if sampling.alternatives > 0:
            logits_V = logits_NV[row].double() / (sampling.temperature or 1.0)
            best, tokens = logits_V.topk(min(sampling.alternatives, len(logits_V)))
            found[row] = tuple(zip(tokens.tolist(), (best - logits_V.logsumexp(dim=-1)).tolist(), strict=True))
    return found


def draw(
    logits_NV: Tensor, settings: Sequence[Sampling], where: NDArray[np.float64], mask: Mask | None = None
) -> Drawn:
    """Draw one token per row. ``logits_NV`` is float32 and is overwritten. ``where``: float64 in [0, 1).

    In the rows of ``mask`` weights count from the best token that is admitted: it may be so unlikely that,
    counted from the best of all, none were left.
    """
    rows, vocabulary = logits_NV.shape
    temperatures = [s.temperature for s in settings]
    greedy = torch.tensor([i for i, t in enumerate(temperatures) if t == 0], dtype=torch.long)
    if any(t != 1 for t in temperatures):
        scale = torch.tensor([1 / t if t else 1.0 for t in temperatures], dtype=torch.float32)
        logits_NV.mul_(scale[:, None])
    top_N, best_N = logits_NV.max(dim=-1)
    below_N = torch.zeros(rows, dtype=torch.float64)  # how far the best admitted token is below the best
    whole_M: Tensor | None = None
    if mask is not None:
        masked = torch.tensor(mask.rows)
        part_MV = logits_NV[masked]
        whole_M = (part_MV - top_N[masked, None]).exp_().sum(dim=-1, dtype=torch.float64)
        logits_NV[masked] = part_MV.masked_fill_(~mask.allowed_MV, -torch.inf)
        top_M, best_N[masked] = part_MV.max(dim=-1)
        below_N[masked] = top_M.double() - top_N[masked].double()
        top_N[masked] = top_M
    weights_NV = logits_NV.sub_(top_N[:, None]).exp_()
    if vocabulary % _WIDTH:
        weights_NV = functional.pad(weights_NV, (0, _WIDTH - vocabulary % _WIDTH))
    blocks_NB = weights_NV.view(rows, -1, _WIDTH).sum(dim=-1, dtype=torch.float32).double()
    kept_N = blocks_NB.sum(dim=-1)
    total_N = kept_N
    if mask is not None and whole_M is not None:
        total_N = kept_N.index_copy(0, torch.tensor(mask.rows), whole_M)
    filtered = [i for i, s in enumerate(settings) if filters(s)]
    if filtered:
        index = torch.tensor(filtered)
        cut = _filter(weights_NV[index], [settings[i] for i in filtered])
        weights_NV[index] = cut
        blocks_NB[index] = cut.view(len(filtered), -1, _WIDTH).sum(dim=-1).double()
        kept_N = blocks_NB.sum(dim=-1)
    tokens_N = _invert(weights_NV, blocks_NB, torch.from_numpy(where))
    tokens_N[greedy] = best_N[greedy]
    chosen_N = weights_NV.gather(1, tokens_N[:, None])[:, 0].double()
    kept_N = kept_N.index_copy(0, greedy, chosen_N[greedy])
    return Drawn(
        tokens_N.tolist(),
        (chosen_N.log() - kept_N.log()).tolist(),
        (chosen_N.log() - total_N.log() + below_N).tolist(),
        (kept_N / total_N * below_N.exp()).tolist(),
    )


def draw_whole(
    kernels: Kernels, logits_NV: Tensor, settings: Sequence[Sampling], where: NDArray[np.float64]
) -> Drawn:
    """Draw like :func:`draw` from the whole distribution, for rows none of which asks for top-k or top-p, in
    one pass of a kernel over float32 logits, which are left as they are.
    """
    rows, vocabulary = logits_NV.shape
    tokens, raw = np.empty(rows, np.int64), np.empty(rows, np.float64)
    inverse = np.array([1 / s.temperature if s.temperature else 0 for s in settings], np.float32)
    kernels.draw(
        logits_NV.data_ptr(), inverse.ctypes.data, where.ctypes.data, tokens.ctypes.data, raw.ctypes.data,
        rows, vocabulary,
    )  # fmt: skip
    greedy = np.array([s.temperature == 0 for s in settings])
    certain = np.where(np.isfinite(raw), 1.0, np.nan)
    return Drawn(
        tokens.tolist(),
        np.where(greedy, np.log(certain), raw).tolist(),
        raw.tolist(),
        np.where(greedy, np.exp(raw), certain).tolist(),
    )


def filters(sampling: Sampling) -> bool:
    """Whether a request draws from a part of the distribution only."""
    return sampling.temperature > 0 and (sampling.top_k > 0 or sampling.top_p < 1)


def _merged(parts: Sequence[tuple[list[int], Drawn]], count: int) -> Drawn:
    """Return one result of ``count`` rows from several, each with the rows that it is of."""
    merged = Drawn([0] * count, [0.0] * count, [0.0] * count, [0.0] * count)
    for rows, drawn in parts:
        for i, row in enumerate(rows):
            merged.tokens[row] = drawn.tokens[i]
            merged.logprobs[row] = drawn.logprobs[i]
            merged.raw_logprobs[row] = drawn.raw_logprobs[i]
            merged.kept_mass[row] = drawn.kept_mass[i]
    return merged


def _invert(weights_NV: Tensor, blocks_NB: Tensor, where_N: Tensor) -> Tensor:
    """Return the first token whose cumulative weight exceeds the share ``where_N``."""
    rows = torch.arange(len(where_N))
    cumulative_NB = blocks_NB.cumsum(dim=-1)
    target_N1 = (where_N * cumulative_NB[:, -1])[:, None]
    block_N = torch.searchsorted(cumulative_NB, target_N1, right=True)[:, 0]
    block_N.clamp_(max=blocks_NB.shape[1] - 1)
    inside_N = blocks_NB[rows, block_N]
    before_N = cumulative_NB[rows, block_N] - inside_N
    share_N = ((target_N1[:, 0] - before_N) / inside_N).clamp_(0, 1)
    values_NW = weights_NV.view(len(rows), -1, _WIDTH)[rows, block_N].double()
    sums_NW = values_NW.cumsum(dim=-1)
    offset_N = torch.searchsorted(sums_NW, share_N[:, None] * sums_NW[:, -1:], right=True)[:, 0]
    last_N = (values_NW > 0).long().mul_(torch.arange(_WIDTH)).amax(dim=-1)
    return block_N * _WIDTH + torch.minimum(offset_N, last_N)


def _filter(weights_MV: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Return the weights with everything outside top-k, then top-p of what that left, set to 0."""
    size = weights_MV.shape[1]
    top_k = torch.tensor([s.top_k if s.top_k > 0 else size for s in settings])[:, None]
    top_p = torch.tensor([s.top_p for s in settings], dtype=torch.float64)[:, None]
    whole_M1 = weights_MV.double().sum(dim=-1, keepdim=True)
    for count in (min(_SHORTLIST, size), size):
        values, order = weights_MV.topk(count, dim=-1)
        sums = values.double().cumsum(dim=-1)
        last = (top_k - 1).clamp(max=count - 1)
        mass = torch.where(top_k <= count, sums.gather(1, last), whole_M1)
        keep = (torch.arange(count) < top_k) & (sums - values < top_p * mass)
        if count == size or bool((~keep[:, -1]).all()):
            break
    return torch.zeros_like(weights_MV).scatter_(1, order, values * keep)
