"""From a model's name to its folder."""

from __future__ import annotations

import json
from pathlib import Path

from lehr.core.errors import ConfigError
from lehr.model.fetch import KNOWN, cached, fetch
from lehr.pipeline.observer import Observer


def locate_model(name: str, observer: Observer) -> Path:
    """Return the folder of a named model (fetched if it is not cached yet) or of a local path.

    Raises ``UnknownName`` or ``ConfigError`` that says what is missing.
    """
    if name in KNOWN:
        found = cached(name)
        if found is not None:
            return found
        observer.note(f"fetching {name}")
        return fetch(name)
    path = Path(name).expanduser()
    if (path / "config.json").exists() and (path / "model.safetensors").exists():
        return path.resolve()
    known = ", ".join(sorted(KNOWN))
    if path.exists():
        raise ConfigError(f"{path} is not a model folder", expected="config.json and model.safetensors in it")
    raise ConfigError(
        f"no model {name!r}",
        expected=f"one of {known}, or a Hugging Face folder",
        hint="`lehr models fetch smollm2-135m` fetches the default one.",
    )


def context_tokens(folder: Path, limit: int = 4096) -> int:
    """Return the model's context length, at most ``limit`` tokens."""
    config = json.loads((folder / "config.json").read_text())
    return min(limit, int(config.get("max_position_embeddings", limit)))
