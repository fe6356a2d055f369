"""Opens a model folder as an engine on transformers."""

from __future__ import annotations

from pathlib import Path

from lehr.core.trace import Version
from lehr.engine.local import LocalEngine
from lehr.engine.native.engine import FIRST
from lehr.engine.transformers.core import TransformersCore
from lehr.engine.transformers.loading import load_model
from lehr.engine.transformers.settings import TransformersConfig
from lehr.model.chat import ChatRenderer
from lehr.model.dtype import compute_dtype
from lehr.model.tokenizer import load_tokenizer


def open_transformers(
    folder: Path, config: TransformersConfig | None = None, version: Version = FIRST
) -> LocalEngine:
    """Return an engine on the model in ``folder``, of any architecture that transformers has."""
    config = config or TransformersConfig()
    tokenizer = load_tokenizer(folder)
    model, found = load_model(folder, compute_dtype(config.dtype))
    core = TransformersCore(
        model,
        vocab_size=found.vocab_size,
        max_positions=found.max_positions,
        config=config,
        tokenizer=tokenizer,
        stop_ids={*ChatRenderer(tokenizer).stop_ids, *found.eos_ids},
        version=version,
    )
    return LocalEngine(core)
