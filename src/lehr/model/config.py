"""The shape of a decoder, to and from the ``config.json`` of a Hugging Face folder.

Owns which model families load. To add one: map its keys in :meth:`ModelConfig.from_hf`, and add its
``model_type`` to :data:`FAMILIES` with the name of its transformers class.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from lehr.core.config import Config
from lehr.core.errors import ConfigError, UnknownName
from lehr.model.scaling import Rope, RopeScaling, read_rope, rescaled, write_rope
from lehr.model.values import count, positive, read_json, token_ids

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""``model_type`` to transformers class. SmolLM and SmolLM2 are of the type ``llama``."""

CAUSAL, SCALAR = "ForCausalLM", "ForSequenceClassification"
"""How the names of transformers classes end: with a vocabulary head, and with a scalar one."""

MOST_LAYERS = 4096
MOST_HEADS = 1 << 16


class ModelConfig(Config):
    """A dense, pre-norm decoder with grouped-query attention and a gated SiLU feed-forward part."""

    family: str = "llama"
    """``model_type`` of the Hugging Face configuration; decides the class that reopens the folder."""
    vocab_size: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_layers: int = Field(gt=0)
    num_heads: int = Field(gt=0)
    num_kv_heads: int = Field(gt=0)
    head_size: int = Field(gt=0)
    max_positions: int = Field(default=2048, gt=0)
    """Longest sequence; where the family has a sliding window, at most that window."""
    norm_eps: float = Field(default=1e-5, gt=0)
    rope: Rope = Rope()
    tied_head: bool = False
    """The head uses the weight of the embedding."""
    scalar: bool = False
    """The head gives one number a position instead of logits: a reward model or a critic."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Queries and keys are normalised per head before rotation (Qwen3)."""
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_size

    def with_scalar_head(self) -> ModelConfig:
        """Return this shape with a scalar head, and with a padding token that ends no answer: transformers
        takes the score at the last token that is not padding, and would otherwise skip the end of the turn.
        """
        ends = {None, *self.eos_ids}
        pad = next(i for i in (self.pad_id, *self.bos_ids, *range(len(ends) + 1)) if i not in ends)
        return self.model_copy(update={"scalar": True, "tied_head": False, "pad_id": pad})

    def scaled(self, scaling: RopeScaling | None) -> ModelConfig:
        """Return this shape under another position scaling, with the longest sequence that it allows."""
        if scaling is None:
            return self
        rope, longest = rescaled(self.rope, self.max_positions, scaling)
        return self.model_copy(update={"rope": rope, "max_positions": longest})

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read the content of a ``config.json``, of old and new transformers alike.

        Raises :class:`UnknownName` for another family, ``KeyError`` for a key that is not there, and
        :class:`ConfigError` for a value that is no such thing or a variant that this decoder would compute
        wrongly.
        """
        family = str(raw["model_type"])
        if family not in FAMILIES:
            raise UnknownName.among("model family", family, FAMILIES)
        _refuse_variants(raw, family)
        heads, hidden = count(raw, "num_attention_heads", most=MOST_HEADS), count(raw, "hidden_size")
        kv_heads = count(raw, "num_key_value_heads", default=heads, most=MOST_HEADS)
        if heads % kv_heads:
            raise ConfigError(
                f"num_attention_heads is {heads} and num_key_value_heads {kv_heads}",
                expected="as many query heads for each key head",
                hint="Correct it, or fetch the model again.",
            )
        bias = bool(raw.get("attention_bias", False))
        scalar = is_scalar(raw)
        rope, longest = read_rope(raw, count(raw, "max_position_embeddings", default=2048))
        return cls(
            family=family,
            vocab_size=count(raw, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=count(raw, "intermediate_size"),
            num_layers=count(raw, "num_hidden_layers", most=MOST_LAYERS),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=count(raw, "head_dim", default=max(1, hidden // heads), most=MOST_HEADS),
            max_positions=_within_window(raw, family, longest),
            norm_eps=positive(raw, "rms_norm_eps", 1e-6),
            rope=rope,
            tied_head=bool(raw.get("tie_word_embeddings", False)) and not scalar,
            scalar=scalar,
            qkv_bias=bias or family == "qwen2",
            o_bias=bias and family in ("llama", "qwen3"),
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=family == "qwen3",
            bos_ids=token_ids(raw, "bos_token_id"),
            eos_ids=token_ids(raw, "eos_token_id"),
            pad_id=next(iter(token_ids(raw, "pad_token_id")), None),
        )

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """Return a ``config.json`` that transformers opens: its old keys and its new ones."""
        dynamic = self.rope.type == "dynamic"
        name = FAMILIES[self.family]
        raw: dict[str, Any] = {
            "architectures": [name.replace(CAUSAL, SCALAR) if self.scalar else name],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": (
                self.rope.original_max_position_embeddings if dynamic else self.max_positions
            ),
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope.theta,
            "rope_parameters": write_rope(self.rope),
            "tie_word_embeddings": self.tied_head,
            "attention_bias": self.qkv_bias and self.family != "qwen2",
            "attention_dropout": 0.0,
            "bos_token_id": _one_or_many(self.bos_ids),
            "eos_token_id": _one_or_many(self.eos_ids),
            "pad_token_id": self.pad_id,
            "use_cache": True,
            "dtype": dtype,
            "torch_dtype": dtype,
        }
        if self.scalar:
            raw |= {"id2label": {"0": "score"}, "label2id": {"score": 0}}
        if self.family == "llama":
            raw["mlp_bias"] = self.mlp_bias
        if self.family == "mistral":
            raw["sliding_window"] = None
        return raw


def load_config(folder: Path) -> ModelConfig:
    """Return the shape of the model in ``folder``; raises ``ConfigError`` or ``UnknownName``."""
    file = folder / "config.json"
    if not file.exists():
        raise ConfigError(f"no config.json in {folder}", expected="a Hugging Face model folder")
    try:
        return ModelConfig.from_hf(read_json(file))
    except KeyError as error:
        raise ConfigError(
            f"{file} lacks the key {error}",
            expected="the configuration of a Hugging Face model",
            hint="Fetch the model again.",
        ) from error
    except UnknownName as error:
        raise UnknownName(f"{file}: {error.what}", expected=error.expected, hint=error.hint) from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.what}", expected=error.expected, hint=error.hint) from error


def is_scalar(raw: Mapping[str, Any]) -> bool:
    """Return whether the folder holds a model with a scalar head."""
    names: list[Any] = raw.get("architectures") or []
    if not any(str(name).endswith(SCALAR) for name in names):
        return False
    labels = raw.get("num_labels") or len(raw.get("id2label") or {}) or 2
    if labels != 1:
        raise ConfigError(
            f"{names[0]} with {labels} labels is a classifier", expected="num_labels = 1: a reward model"
        )
    return True


def _refuse_variants(raw: Mapping[str, Any], family: str) -> None:
    activation = raw.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ConfigError(
            f"hidden_act {activation!r} of this {family} model is not supported", expected="'silu'"
        )
    if raw.get("quantization_config"):
        raise ConfigError(
            "the folder holds quantised weights", expected="plain float weights", hint="Dequantise it first."
        )


def _within_window(raw: Mapping[str, Any], family: str, longest: int) -> int:
    slides = family == "mistral" or bool(raw.get("use_sliding_window"))
    return min(longest, count(raw, "sliding_window", default=longest)) if slides else longest


def _one_or_many(ids: tuple[int, ...]) -> int | list[int] | None:
    if not ids:
        return None
    return ids[0] if len(ids) == 1 else list(ids)
