"""Model folders and published weights, opened by transformers."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lehr.core.errors import ConfigError, MissingDependency
from lehr.engine.base import EngineError
from lehr.model.outline import Outline, outline
from lehr.model.weights import weight_files

INSTALL = "pip install 'lehr[transformers]'"


def require_transformers() -> Any:
    """Return the package, or raise :class:`MissingDependency` with the command that installs it."""
    try:
        import transformers
    except ImportError as error:
        raise MissingDependency(
            "the package transformers is not installed, which models of this kind need",
            hint=f"Install it: `{INSTALL}`",
        ) from error
    return transformers


def load_model(folder: Path, dtype: torch.dtype) -> tuple[Any, Outline]:
    """Return the model in ``folder`` and what is asked of it.

    Only safetensors are read and no code of the folder is run. Raises :class:`ConfigError` where transformers
    cannot open it, or where weights are missing.
    """
    transformers = require_transformers()
    found = outline(folder)
    weight_files(folder)
    try:
        with _quiet(transformers):
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, local_files_only=True, trust_remote_code=False, use_safetensors=True,
                output_loading_info=True,
            )  # fmt: skip
    except (ValueError, OSError, RuntimeError, KeyError, ImportError) as error:
        raise ConfigError(
            f"transformers cannot open {folder}: {_first_line(error)}",
            expected="a causal language model whose class transformers has",
            hint="A newer transformers may know it; models that bring code of their own are not run.",
        ) from error
    if problem := _incomplete(report):
        raise ConfigError(f"the weights in {folder} {problem}", hint="Fetch the model again.")
    return model.eval(), found


def with_weights(model: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Any:
    """Return another model like ``model`` with the weights ``tensors``. Raises :class:`EngineError` if they are
    not those of such a model.
    """
    transformers = require_transformers()
    try:
        with _quiet(transformers):
            made, report = type(model).from_pretrained(
                None, config=model.config, state_dict=dict(tensors), dtype=dtype, output_loading_info=True
            )
    except (ValueError, RuntimeError, KeyError) as error:
        raise EngineError(f"the published weights do not fit the model: {_first_line(error)}") from error
    if problem := _incomplete(report):
        raise EngineError(f"the published weights {problem}", expected="the tensors of the running model")
    return made.eval()


def _incomplete(report: Mapping[str, Any]) -> str:
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        names = sorted(map(str, report.get(what) or ()))
        if names:
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            return f"have {what.replace('_keys', '')} tensors: {shown}"
    errors = report.get("error_msgs") or ()
    return f"cannot be read: {errors[0]}" if errors else ""


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


@contextmanager
def _quiet(transformers: Any) -> Generator[None]:
    """Keep progress bars and load reports off the terminal; what they say is raised as an error instead."""
    settings = transformers.utils.logging
    level, shown = settings.get_verbosity(), settings.is_progress_bar_enabled()
    settings.set_verbosity_error()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        settings.set_verbosity(level)
        if shown:
            settings.enable_progress_bar()
