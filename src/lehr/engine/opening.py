"""Opens a model folder with the engine that can sample from it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lehr.core.errors import ConfigError
from lehr.core.trace import Version
from lehr.engine.local import LocalEngine, open_engine
from lehr.engine.native.engine import FIRST
from lehr.engine.native.settings import NativeConfig
from lehr.model.outline import Outline, outline

_SHARED = frozenset({"max_running", "token_budget", "cache_tokens", "dtype", "kernels"})
"""Settings that mean the same to both engines, or change no result."""


def open_any(
    folder: Path,
    config: NativeConfig | None = None,
    version: Version = FIRST,
    *,
    note: Callable[[str], None],
) -> LocalEngine:
    """Return the native engine where its decoder knows the model's family, else one on transformers with the
    same limits; ``note`` is told of that.

    Raises :class:`MissingDependency` where transformers is needed and not installed, and :class:`ConfigError`
    for a setting that only the native engine has.
    """
    config = config or NativeConfig()
    found = require_engine(folder, config)
    if found.known:
        return open_engine(folder, config, version)
    from lehr.engine.transformers.opening import open_transformers
    from lehr.engine.transformers.settings import TransformersConfig

    note(why_slow(folder, found))
    same = {name: getattr(config, name) for name in ("cache_tokens", "dtype")}
    running = min(config.max_running, TransformersConfig().max_running)
    return open_transformers(folder, TransformersConfig(max_running=running, **same), version)


def require_engine(folder: Path, config: NativeConfig) -> Outline:
    """Return the model's outline. Raises :class:`ConfigError` for a family that the native engine does not know
    together with a setting that it alone has.
    """
    found, usual = outline(folder), NativeConfig()
    for name in () if found.known else (n for n in NativeConfig.model_fields if n not in _SHARED):
        value = getattr(config, name)
        if value != getattr(usual, name):
            raise ConfigError(
                f"{name} is {value!r}, which the native engine alone has, and it does not know the family"
                f" {found.family!r}",
                expected=repr(getattr(usual, name)),
            )
    return found


def why_slow(folder: Path, found: Outline) -> str:
    """Return what a person should know before a model is sampled from by transformers."""
    return (
        f"{folder.name}: the native engine does not know the family {found.family!r}. Sampling with"
        " transformers, one request after the other and without a prefix cache: many times slower."
    )
