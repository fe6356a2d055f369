"""Which files hold a model's weights, and whether they are whole; answered without torch."""

from __future__ import annotations

from pathlib import Path

from lehr.core.errors import ConfigError
from lehr.model.values import read_json

WEIGHTS = "model.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """Return the one file, or the shards that the index names. Raises what :func:`require_whole` does."""
    index = read_json(folder / f"{WEIGHTS}.index.json").get("weight_map")
    names = sorted({str(name) for name in index.values()}) if isinstance(index, dict) else [WEIGHTS]
    files = [folder / name for name in names]
    for file in files:
        require_whole(file)
    return files


def require_whole(path: Path) -> None:
    """Raise :class:`ConfigError` if a safetensors file is missing, cut off or no such file. Reads its head."""
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise ConfigError(
            f"no weights in {path.parent}: {path.name} is missing",
            expected="safetensors files",
            hint="Fetch the model again, or convert its weights to safetensors.",
        )
    try:
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}", expected="a whole safetensors file", hint="Fetch the model again."
        ) from error
