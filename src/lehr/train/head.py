"""The vocabulary head and the loss in one pass, over loss positions only and in chunks.

Logits of all positions never exist: a chunk of rows is projected, normalised in float32, turned into its own
gradient in place and multiplied back, before the next chunk is touched. Where the loss of a token depends on
its own log-probability alone, nothing is computed twice. Where it depends on other tokens (of its sequence, or
of the other one of its pair), all log-probabilities are computed first, the loss gives a slope for each, and a
second pass over the chunks multiplies the slopes back: twice the projection, and no more memory than ``[N]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lehr.model.decoder import float32_product

CHUNK_BYTES = 64 << 20
"""Float32 logits that exist at a time."""

TokenLoss = Callable[[Tensor, slice], Tensor]
"""Maps the log-probabilities of a slice of the loss tokens to losses that are summed: ``[n]`` to ``[n]``; where
it couples tokens it is called once, with all of them, and may return any shape."""


@dataclass(frozen=True, slots=True)
class HeadResult:
    """logprobs_N: float32, of the targets (scores under a scalar head). entropy_N: float32, in nats, of the
    distribution at each, at its temperature; None under a scalar head. loss: the sum over tokens.
    grad_hidden_ND: of that sum.
    """

    logprobs_N: Tensor
    entropy_N: Tensor | None
    loss: float
    grad_hidden_ND: Tensor


def chunk_rows(vocab_size: int) -> int:
    """Return how many rows of float32 logits make up a chunk."""
    return max(16, CHUNK_BYTES // (4 * vocab_size))


@torch.no_grad()
def target_logprobs(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, temperatures_N: Tensor) -> Tensor:
    """Return float32 ``log softmax(logits / temperature)[target]``, ``[N]``."""
    found = torch.empty(len(targets_N), dtype=torch.float32)
    step = chunk_rows(weight_VD.shape[0])
    for start in range(0, len(targets_N), step):
        part = slice(start, start + step)
        found[part] = _chunk(hidden_ND[part], weight_VD, targets_N[part], temperatures_N[part])[1]
    return found


@torch.no_grad()
def head_loss(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    token_loss: TokenLoss,
    grad_weight_VD: Tensor | None,
    *,
    coupled: bool = False,
) -> HeadResult:
    """Return the summed loss and its gradient for ``hidden_ND``; add that of the weight to
    ``grad_weight_VD`` (float32; None: not wanted). ``coupled``: give ``token_loss`` all tokens at once.
    """
    count = len(targets_N)
    logprobs = torch.empty(count, dtype=torch.float32)
    entropy = torch.empty(count, dtype=torch.float32)
    grad_hidden = torch.empty_like(hidden_ND)
    total = 0.0
    slopes: Tensor | None = None
    if coupled:
        everything = target_logprobs(hidden_ND, weight_VD, targets_N, temperatures_N)
        total, slopes = _slope(token_loss, everything, slice(0, count))
    step = chunk_rows(weight_VD.shape[0])
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        hidden, targets = hidden_ND[part], targets_N[part]
        log_softmax, chosen = _chunk(hidden, weight_VD, targets, temperatures_N[part])
        logprobs[part] = chosen
        if slopes is None:
            loss, slope = _slope(token_loss, chosen, part)
            total += loss
        else:
            slope = slopes[part]
        slope = slope.div_(temperatures_N[part])
        flow = log_softmax.exp()
        entropy[part] = log_softmax.mul_(flow).sum(-1).neg_()
        del log_softmax  # before the next chunk is there
        flow.mul_(-slope[:, None])
        flow.scatter_add_(1, targets[:, None], slope[:, None])
        narrow = flow.to(weight_VD.dtype)
        del flow
        torch.mm(narrow, weight_VD, out=grad_hidden[part])
        if grad_weight_VD is not None and grad_weight_VD.dtype == narrow.dtype:
            grad_weight_VD.addmm_(narrow.t(), hidden)
        elif grad_weight_VD is not None:
            grad_weight_VD.add_(torch.mm(narrow.t(), hidden))
        del narrow
    return HeadResult(logprobs, entropy, total, grad_hidden)


@torch.no_grad()
def scores(hidden_ND: Tensor, weight_1D: Tensor) -> Tensor:
    """Return what a scalar head says, float32 ``[N]``."""
    return hidden_ND.float() @ weight_1D[0].float()


@torch.no_grad()
def scalar_loss(
    hidden_ND: Tensor, weight_1D: Tensor, score_loss: TokenLoss, grad_weight_1D: Tensor
) -> HeadResult:
    """Do what :func:`head_loss` does for a scalar head: the loss is one of scores, always of all at once."""
    found = scores(hidden_ND, weight_1D)
    total, slope = _slope(score_loss, found, slice(0, len(found)))
    grad_weight_1D.add_((slope @ hidden_ND.float())[None])
    return HeadResult(found, None, total, (slope[:, None] * weight_1D.float()).to(hidden_ND.dtype))


def _chunk(hidden: Tensor, weight: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    logits = float32_product(hidden, weight)
    if not bool((temperatures == 1.0).all()):
        logits.div_(temperatures[:, None])
    log_softmax = torch.log_softmax(logits, -1)
    return log_softmax, log_softmax.gather(1, targets[:, None])[:, 0]


def _slope(token_loss: TokenLoss, logprobs: Tensor, part: slice) -> tuple[float, Tensor]:
    with torch.enable_grad():
        leaf = logprobs.detach().clone().requires_grad_()
        loss = token_loss(leaf, part).sum()
        (slope,) = torch.autograd.grad(loss, leaf)
    return float(loss.detach()), slope
