"""Drafts written by a smaller model with the same tokens.

It draws with the random numbers of the positions that it drafts for, as the large model will: where the two
distributions agree, so do the tokens. It keeps keys and values of its own, in rows of its own, which count
towards no budget; what was drafted and not accepted is overwritten.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lehr.core.errors import ConfigError
from lehr.engine.native.attention import Span, StepAttention
from lehr.engine.native.drafts import Width
from lehr.engine.native.fused import FusedForward
from lehr.engine.native.kernels.load import kernels_for
from lehr.engine.native.packing import pack
from lehr.engine.native.request import Request
from lehr.engine.native.rows import Rows, Slot
from lehr.engine.native.sampler import draw, uniform
from lehr.model.config import ModelConfig
from lehr.model.decoder import Decoder


class DraftModel:
    """A decoder that drafts. ``decoder`` is taken over; its weights stay when the large model's are swapped."""

    def __init__(self, decoder: Decoder, target: ModelConfig, *, kernels: bool) -> None:
        self.config = decoder.config
        if self.config.vocab_size != target.vocab_size:
            raise ConfigError(
                f"the draft model has {self.config.vocab_size} tokens and the model {target.vocab_size}",
                expected="a smaller model of the same family, with the same tokenizer",
            )
        dtype = decoder.embed.weight.dtype
        compiled = kernels_for(dtype) if kernels else None
        self._decoder = pack(decoder, compiled)
        self._fused = FusedForward(decoder, compiled) if compiled else None
        self.rows = Rows(decoder.config, dtype)

    def logits(self, tokens: list[int], slot: Slot, start: int) -> Tensor:
        """Compute ``tokens`` from position ``start`` on; return float32 logits after the last, ``[1, V]``."""
        span = Span(slot, start, len(tokens), 0)
        if self._fused:
            hidden_TD = self._fused.hidden(tokens, [span])
        else:
            one = len(tokens) == 1
            attention = StepAttention([span] if one else [], [] if one else [span], slot.lane.kv.dtype)
            positions = torch.arange(start, start + len(tokens))
            hidden_TD = self._decoder.hidden(torch.tensor(tokens), positions, attention)
        return self._decoder.logits(hidden_TD[-1:])

    def source(self, request: Request, most: int) -> ModelDrafter:
        """Return what drafts for a request."""
        return ModelDrafter(self, request, Width(most))


class ModelDrafter:
    """Implements ``drafts.DraftSource`` for one request."""

    def __init__(self, model: DraftModel, request: Request, width: Width) -> None:
        self._model, self._request, self._width = model, request, width
        self._slot: Slot | None = None
        self._computed: list[int] = []
        """Tokens whose keys and values are in the row."""

    def draft(self, room: int) -> list[int]:
        """Return up to ``room`` tokens that may follow the request's."""
        tokens, own = self._request.tokens, self._request.own
        room = min(room, self._width.most, self._width.now, self._model.config.max_positions - len(tokens))
        if room < 1:
            return []
        if self._slot is None:
            self._slot = self._model.rows.take(min(self._request.longest, self._model.config.max_positions))
        start = min(_common(self._computed, tokens), len(tokens) - 1)
        del self._computed[start:]
        where = uniform([self._request.seed] * room, range(own, own + room))
        drafted: list[int] = []
        while len(drafted) < room:
            new = [*tokens[start:], *drafted] if not drafted else drafted[-1:]
            logits_1V = self._model.logits(new, self._slot, len(self._computed))
            self._computed += new
            at = np.array([where[len(drafted)]])
            drafted += draw(logits_1V, [self._request.sampling], at).tokens
        return drafted

    def learn(self, drafted: int, accepted: int) -> None:
        """Take note of how much of the last draft was accepted."""
        self._width.learn(drafted, accepted)

    def close(self) -> None:
        """Give the row back."""
        if self._slot is not None:
            self._slot.lane.free(self._slot, self._slot.lane.capacity)
            self._slot, self._computed = None, []


def _common(first: list[int], second: list[int]) -> int:
    """Return how many leading tokens are the same."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return next(i for i in range(length) if first[i] != second[i])
