"""One forward and backward over a micro-batch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lehr.core.errors import ConfigError
from lehr.model.decoder import Decoder
from lehr.train.attention import SpanAttention
from lehr.train.fused import between_products
from lehr.train.head import HeadResult, TokenLoss, head_loss, scalar_loss, scores, target_logprobs
from lehr.train.packing import Microbatch
from lehr.train.tiles import tile_attention


def _run(decoder: Decoder, batch: Microbatch, x_TD: Tensor, *, recompute: bool = False) -> Tensor:
    config = decoder.config
    longest = int(batch.positions.max()) + 1
    if decoder.rotary.depends_on(longest):
        raise ConfigError(
            f"a sequence of {longest} tokens cannot be trained on with dynamic position scaling",
            expected=f"at most {config.rope.original_max_position_embeddings} tokens, or another scaling",
            hint="Its angles depend on the length; give the model's config.json the type yarn.",
        )
    rows, groups = len(batch.tokens), config.num_heads // config.num_kv_heads
    attend = tile_attention(batch.spans, config.head_size, x_TD.dtype) or SpanAttention(
        batch.spans, rows, groups=groups
    )
    turns = decoder.rotary.angles(torch.from_numpy(batch.positions), x_TD.dtype)
    between = between_products(x_TD.dtype)
    block = decoder.block
    if recompute:
        block = functools.partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
    for number, layer in enumerate(decoder.blocks()):
        x_TD = layer(block, number, x_TD, turns, attend, between)
    return between.norm(x_TD, decoder.norm)[1]


@torch.no_grad()
def score(decoder: Decoder, batch: Microbatch) -> Tensor:
    """Return float32 ``[N]``: the log-probability of each loss token at its temperature; under a scalar head,
    the score of what stands before it.
    """
    rows, targets, temperatures = map(torch.from_numpy, (batch.rows, batch.targets, batch.temperatures))
    hidden_TD = _run(decoder, batch, decoder.embed(torch.from_numpy(batch.tokens)))
    if decoder.config.scalar:
        return scores(hidden_TD[rows], decoder.head.weight)
    return target_logprobs(hidden_TD[rows], decoder.head.weight, targets, temperatures)


def accumulate(
    decoder: Decoder,
    batch: Microbatch,
    token_loss: TokenLoss,
    grad_embed_VD: Tensor | None,
    grad_head_VD: Tensor | None,
    *,
    coupled: bool = False,
    recompute: bool = False,
) -> HeadResult:
    """Add the gradient of the summed token losses to the parameters' ``grad``; that of the embedding and
    of the head goes into the float32 accumulators given (one and the same when they are tied; None: it is not
    wanted). ``coupled``: the loss of a token depends on others, see :mod:`lehr.train.head`. ``recompute``: keep
    only the input of each layer for the backward pass. Under a scalar head the loss is one of scores.

    Returns the loss, and of each loss token its log-probability and entropy (or its score).
    """
    rows, targets, temperatures = map(torch.from_numpy, (batch.rows, batch.targets, batch.temperatures))
    ids = torch.from_numpy(batch.tokens)
    with torch.no_grad():
        x_TD = decoder.embed(ids)
    x_TD.requires_grad_()
    hidden_TD = _run(decoder, batch, x_TD, recompute=recompute)
    rows_ND = hidden_TD.detach()[rows]
    weight = decoder.head.weight
    if decoder.config.scalar:
        assert grad_head_VD is not None, "a scalar head is always trained"
        result = scalar_loss(rows_ND, weight, token_loss, grad_head_VD)
    else:
        result = head_loss(rows_ND, weight, targets, temperatures, token_loss, grad_head_VD, coupled=coupled)
    flow = torch.zeros_like(hidden_TD).index_add_(0, rows, result.grad_hidden_ND)
    hidden_TD.backward(flow)
    if x_TD.grad is not None and grad_embed_VD is not None:
        grad_embed_VD.index_add_(0, ids, x_TD.grad.to(grad_embed_VD.dtype))
    return result
