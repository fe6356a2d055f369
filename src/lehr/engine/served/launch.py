"""What opening any server needs to know of a model folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lehr.core.errors import ConfigError
from lehr.core.trace import Version
from lehr.model.chat import ChatRenderer
from lehr.model.checkpoint import load_config
from lehr.model.tokenizer import load_tokenizer

FIRST = Version(0, 0)
"""The version of weights that nobody named."""
UNNAMED = "default"
"""What servers call the version of weights that nobody named."""


def token_of(url: str, variable: str) -> str:
    """Return the token of the server at ``url`` from the environment."""
    token = os.environ.get(variable, "")
    if not token:
        raise ConfigError(
            f"there is no token for the server at {url}",
            expected=f"it in the environment variable {variable}",
        )
    return token


def stop_ids(folder: Path) -> list[int]:
    """Return the tokens that end a completion of the model in ``folder``."""
    return sorted({*ChatRenderer(load_tokenizer(folder)).stop_ids, *load_config(folder).eos_ids})


def stored_dtype(folder: Path) -> str:
    """Return the dtype that the folder names: the servers' own ``auto`` would halve float32."""
    raw = json.loads((folder / "config.json").read_text())
    return str(raw.get("dtype") or raw.get("torch_dtype") or "auto")


def has_tokenizer(folder: Path) -> bool:
    """Whether a server can load the folder's tokenizer."""
    return (folder / "tokenizer.json").exists()
