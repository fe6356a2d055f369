"""The one decoder that sampler and trainer share.

Attention is passed in (:class:`lehr.model.base.Attend`), because how positions see each other is the only
thing in which sampling and training differ. Projections that read the same input are fused (``qkv``,
``gate_up``); they are modules that are called, so that an engine may put packed ones in their place.

Shape letters as in ``lehr.model.base``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from lehr.core.errors import ConfigError
from lehr.model.base import Attend
from lehr.model.config import ModelConfig
from lehr.model.rotary import Rotary, rotate

_WIDENED = 16384
"""Outputs whose weights are in float32 at a time."""


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 whatever the dtype of its input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` scaled to unit root mean square over its last dimension, times the weight."""
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Plain:
    """What a block does between its matrix products, with torch's operations. A trainer may give others."""

    def norm(self, x_TD: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """Return the residual stream, to go on with, and its norm."""
        return x_TD, norm(x_TD)

    def gated(self, gate_up_TI: Tensor) -> Tensor:
        """Return ``silu(gate) * up``."""
        gate, up = gate_up_TI.chunk(2, dim=-1)
        return functional.silu(gate) * up


PLAIN = Plain()


class Layer(nn.Module):
    """One block: attention, then the gated feed-forward part, each added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, q, kv, inner = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size
        self.attn_norm = RMSNorm(hidden, config.norm_eps)
        self.qkv = nn.Linear(hidden, q + 2 * kv, bias=config.qkv_bias)
        self.o = nn.Linear(q, hidden, bias=config.o_bias)
        self.mlp_norm = RMSNorm(hidden, config.norm_eps)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=config.mlp_bias)
        self.down = nn.Linear(inner, hidden, bias=config.mlp_bias)
        self.q_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_size, config.norm_eps) if config.qk_norm else None

    def forward(self, run: Callable[..., Tensor], *inputs: Any) -> Tensor:
        """Return ``run(self, *inputs)``: called as a module, so that who divides its weights can bring them."""
        return run(self, *inputs)


class Head(nn.Linear):
    """The last layer. It gives float32 whatever its weight is in: bfloat16 knows a logit of 20 to an eighth
    only, so that sampler and trainer, each a little off, would disagree about a token by that much.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return float32 ``[N, V]`` of hidden states ``[N, D]``."""
        return float32_product(input, self.weight)


def float32_product(x_ND: Tensor, weight_OD: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in float32, ``[N, O]``. Of a narrower weight a part is widened at a time."""
    if weight_OD.dtype is torch.float32:
        return x_ND @ weight_OD.t()
    wide_ND = x_ND.float()
    return torch.cat([wide_ND @ part.float().t() for part in weight_OD.split(_WIDENED)], dim=-1)


class Decoder(nn.Module):
    """Embedding, layers, final norm and head (logits, or one number where the configuration says ``scalar``).
    Stateless between calls; build it with :meth:`from_hf`.

    ``embed``, ``layers[i].{attn_norm,qkv,o,mlp_norm,gate_up,down}``, ``norm`` and ``head`` are called, never
    reached into, except by the trainer, which needs real weights. A tied head shares the embedding's
    parameter.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # given, or it would be drawn at random: on the meta device, that loads a compiler for seconds
        table = torch.empty(config.vocab_size, config.hidden_size)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, _weight=table)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = Head(config.hidden_size, 1 if config.scalar else config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight
        self.rotary = Rotary(config.rope, config.head_size)

    def blocks(self) -> Iterator[Layer]:
        """Yield the layers in order."""
        for layer in self.layers:
            yield cast(Layer, layer)

    def hidden(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, lengths_T: Sequence[int] | None = None
    ) -> Tensor:
        """Return the hidden states after the final norm, ``[T, D]``. ``lengths_T`` as in ``Rotary.angles``."""
        return self.transform(self.embed(tokens_T), positions_T, attend, lengths_T)

    def transform(
        self, x_TD: Tensor, positions_T: Tensor, attend: Attend, lengths_T: Sequence[int] | None = None
    ) -> Tensor:
        """Return :meth:`hidden` of tokens that are embedded already."""
        turns = self.rotary.angles(positions_T, x_TD.dtype, lengths_T)
        for number, layer in enumerate(self.blocks()):
            x_TD = self.block(layer, number, x_TD, turns, attend)
        return self.norm(x_TD)

    def block(
        self,
        layer: Layer,
        number: int,
        x_TD: Tensor,
        turns: tuple[Tensor, Tensor],
        attend: Attend,
        between: Plain = PLAIN,
    ) -> Tensor:
        """Return the residual stream after one layer. ``turns``: cosines and sines of the positions."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        x_TD, normed_TD = between.norm(x_TD, layer.attn_norm)
        qkv = layer.qkv(normed_TD).unflatten(-1, (-1, self.config.head_size))
        turning, value_TKE = qkv.split((heads + kv_heads, kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            query, key = turning.split((heads, kv_heads), dim=1)
            turning = torch.cat((layer.q_norm(query), layer.k_norm(key)), dim=1)
        query_THE, key_TKE = rotate(turning, *turns).split((heads, kv_heads), dim=1)
        mixed_THE = attend(number, query_THE, key_TKE, value_TKE)
        x_TD = x_TD + layer.o(mixed_THE.flatten(1))
        x_TD, normed_TD = between.norm(x_TD, layer.mlp_norm)
        return x_TD + layer.down(between.gated(layer.gate_up(normed_TD)))

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Return float32 logits ``[N, V]``."""
        return self.head(hidden_ND)

    @classmethod
    def from_hf(
        cls, config: ModelConfig, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
    ) -> Decoder:
        """Build a decoder from tensors under their Hugging Face names. The tensors are copied.

        Raises :class:`ConfigError` that names a missing tensor or a wrong shape.
        """
        with torch.device("meta"):
            decoder = cls(config)
        for _ in decoder._matched(tensors):  # before memory of the sizes that the configuration claims is taken
            pass
        decoder.to_empty(device="cpu")
        decoder.to(dtype)
        if config.tied_head:
            decoder.head.weight = decoder.embed.weight
        decoder.load_hf(tensors)
        return decoder

    @torch.no_grad()
    def load_hf(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors under their Hugging Face names into the weights in place."""
        for view, source in self._matched(tensors):
            view.copy_(source)

    def _matched(self, tensors: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each weight with the tensor that belongs in it."""
        for name, view in self._named_views():
            source = tensors.get(name)
            if source is None and name == "lm_head.weight":
                source = tensors.get("model.embed_tokens.weight")
            if source is None:
                raise ConfigError(f"the weights lack {name!r}", hint="Check that the model folder is complete.")
            if source.shape != view.shape:
                raise ConfigError(f"{name!r} has shape {tuple(source.shape)}", expected=str(tuple(view.shape)))
            yield view, source

    def to_hf(self) -> dict[str, Tensor]:
        """Return the weights under their Hugging Face names: contiguous views, nothing is copied."""
        return {name: view.detach() for name, view in self._named_views()}

    def _named_views(self) -> Iterator[tuple[str, Tensor]]:
        q, kv, inner = self.config.q_size, self.config.kv_size, self.config.intermediate_size
        yield "model.embed_tokens.weight", self.embed.weight
        for number, layer in enumerate(self.blocks()):
            base = f"model.layers.{number}"
            for ours, theirs, names, sizes in (
                ("qkv", "self_attn", ("q_proj", "k_proj", "v_proj"), (q, kv, kv)),
                ("o", "self_attn", ("o_proj",), None),
                ("gate_up", "mlp", ("gate_proj", "up_proj"), (inner, inner)),
                ("down", "mlp", ("down_proj",), None),
            ):
                for kind, fused in layer.get_submodule(ours).named_parameters():
                    parts = fused.split(sizes) if sizes else (fused,)
                    for name, part in zip(names, parts, strict=True):
                        yield f"{base}.{theirs}.{name}.{kind}", part
            yield f"{base}.input_layernorm.weight", layer.attn_norm.weight
            yield f"{base}.post_attention_layernorm.weight", layer.mlp_norm.weight
            if layer.q_norm is not None and layer.k_norm is not None:
                yield f"{base}.self_attn.q_norm.weight", layer.q_norm.weight
                yield f"{base}.self_attn.k_norm.weight", layer.k_norm.weight
        yield "model.norm.weight", self.norm.weight
        if not self.config.tied_head:
            yield "score.weight" if self.config.scalar else "lm_head.weight", self.head.weight
