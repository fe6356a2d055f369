"""Log-probabilities of given tokens, by one plain forward pass without a cache."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lehr.engine.native.flash import chunk_attention
from lehr.model.decoder import Decoder

_ROWS = 64


@torch.inference_mode()
def score(decoder: Decoder, tokens: list[int], temperature: float) -> NDArray[np.float32]:
    """Return float32[T-1]: log-softmax(logits / temperature) of each token after the first; temperature 0
    counts as 1. Logits exist for a few positions at a time only, scores of attention for a tile of keys.
    """
    ids_T = torch.tensor(tokens)
    if len(ids_T) < 2:
        return np.zeros(0, dtype=np.float32)

    def attend(layer: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        return chunk_attention(query_THE, key_TKE.transpose(0, 1), value_TKE.transpose(0, 1), 0)

    hidden_TD = decoder.hidden(ids_T[:-1], torch.arange(len(ids_T) - 1), attend)
    parts: list[Tensor] = []
    for hidden_ND, next_N in zip(hidden_TD.split(_ROWS), ids_T[1:].split(_ROWS), strict=True):
        logits_NV = decoder.logits(hidden_ND) / (temperature or 1.0)
        parts.append(logits_NV.gather(1, next_N[:, None])[:, 0] - logits_NV.logsumexp(dim=-1))
    return torch.cat(parts).numpy()
