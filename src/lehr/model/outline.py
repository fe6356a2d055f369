"""What sampling has to know of a model folder, of a family that the decoder knows or of any other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lehr.core.errors import ConfigError
from lehr.model.config import FAMILIES, load_config
from lehr.model.values import count, read_json, table, token_ids

_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "max_sequence_length")
_UNSTATED = 1 << 20
"""Positions of an architecture that names no longest sequence, such as a recurrent one."""


@dataclass(frozen=True, slots=True)
class Outline:
    """family: ``model_type``. known: whether the decoder computes it. max_positions: longest sequence."""

    family: str
    known: bool
    vocab_size: int
    max_positions: int
    eos_ids: tuple[int, ...]


def outline(folder: Path) -> Outline:
    """Return it from ``config.json`` alone. Raises :class:`ConfigError` naming what is wrong there."""
    file = folder / "config.json"
    raw = read_json(file)
    family = raw.get("model_type")
    if family in FAMILIES or not file.exists():
        config = load_config(folder)
        return Outline(config.family, True, config.vocab_size, config.max_positions, config.eos_ids)
    if not isinstance(family, str):
        raise ConfigError(f"{file} names no model_type", expected="the configuration of a Hugging Face model")
    try:
        return _foreign(family, raw, read_json(folder / "generation_config.json"))
    except KeyError as error:
        raise ConfigError(f"{file} lacks the key {error}", hint="Fetch the model again.") from error
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.what}", expected=error.expected, hint=error.hint) from error


def _foreign(family: str, raw: Mapping[str, Any], generation: Mapping[str, Any]) -> Outline:
    inner = table(raw, "text_config") or raw
    longest = next((count(inner, key) for key in _LENGTHS if inner.get(key) is not None), _UNSTATED)
    eos = {i for settings in (inner, raw, generation) for i in token_ids(settings, "eos_token_id")}
    return Outline(family, False, count(inner, "vocab_size"), longest, tuple(sorted(eos)))
