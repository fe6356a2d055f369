"""From a model's name to its folder."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from lehr.core.errors import ConfigError, MissingDependency, UnknownName
from lehr.ledger.reader import LedgerReader
from lehr.model.chat import ChatRenderer
from lehr.model.config import is_scalar, load_config
from lehr.model.fetch import MODELS, fetch, home, locate, ready_home
from lehr.model.outline import outline
from lehr.model.tokenizer import ByteTokenizer, load_tokenizer
from lehr.model.values import read_json
from lehr.model.weights import weight_files
from lehr.pipeline.folder import RunFolder
from lehr.pipeline.observer import Observer
from lehr.pipeline.recipe import Stage

TINY = "tiny"
"""A random model of a few layers with a byte tokenizer, built on the spot."""


def locate_model(name: str, observer: Observer, *, only_sampled: bool = False) -> Path:
    """Return the folder of a model: ``tiny``, a named one (fetched if it is not here yet), a Hugging Face
    folder, or a run folder, whose last finished stage is meant.

    only_sampled: it is not trained, and so may be of a family that the decoder does not know, where
    transformers is installed; the observer is then told that this is slow.

    Raises ``UnknownName`` or ``ConfigError`` that says what is missing and what to type.
    """
    if name == TINY:
        return _tiny()
    if name in MODELS:
        return fetch(name, observer.note)
    folder = _placed(name, only_sampled)
    if only_sampled and not (found := outline(folder)).known:
        from lehr.engine.opening import why_slow

        observer.note(why_slow(folder, found))
    return folder


def require_model(name: str, *, only_sampled: bool = False) -> None:
    """Raise what :func:`locate_model` would, and fetch nothing."""
    if name != TINY and name not in MODELS:
        _placed(name, only_sampled)


def _placed(name: str, only_sampled: bool) -> Path:
    path = Path(name).expanduser()
    if RunFolder(path).begun:
        return trained_model(path)
    if not name or (not path.exists() and os.sep not in name and not name.startswith((".", "~"))):
        raise UnknownName.among(
            "model", name, [TINY, *MODELS], hint="A path to a Hugging Face folder works as well."
        )
    folder = locate(name)
    _require_language_model(folder)
    if only_sampled:
        _require_known_or_transformers(folder)
    else:
        _require_trainable(folder)
    weight_files(folder)
    load_renderer(folder)
    return folder


def _require_language_model(folder: Path) -> None:
    if is_scalar(read_json(folder / "config.json")):
        raise ConfigError(
            f"{folder} holds a reward model, which answers nothing",
            expected="a language model",
            hint="`lehr eval --pairs FILE --model FOLDER` says how often it prefers the better answer.",
        )


def _require_trainable(folder: Path) -> None:
    try:
        load_config(folder)
    except UnknownName as error:
        hint = "It can only be sampled from: `lehr serve` and `lehr eval` do that through transformers."
        raise UnknownName(error.what, expected=error.expected, hint=error.hint or hint) from error


def _require_known_or_transformers(folder: Path) -> None:
    found = outline(folder)
    if not found.known and importlib.util.find_spec("transformers") is None:
        raise MissingDependency(
            f"{folder} is a model of the family {found.family!r}, which needs the package transformers",
            hint="Install it: `pip install 'lehr[transformers]'`",
        )


def trained_model(run: Path) -> Path:
    """Return the checkpoint of the run's last finished stage that is not a control.

    Raises ``ConfigError`` where no stage of the run has finished yet, or where its checkpoint is gone.
    """
    stage = last_stage(run)
    if stage is None:
        raise ConfigError(
            f"{run} has no trained checkpoint yet",
            expected="a run with at least one finished stage",
            hint=f"Go on with it: `lehr runs resume {run}`",
        )
    return RunFolder(run).require_checkpoint(stage)


def last_stage(run: Path) -> str | None:
    """Return the name of the run's last finished stage that is no control and no reward model, or None if there
    is none yet.
    """
    return _last(run, lambda stage: stage.type not in ("control", "reward_model"))


def locate_reward_model(path: Path) -> Path:
    """Return the folder of a reward model: ``path`` itself, or what the last finished ``reward_model`` stage of
    the run in ``path`` left.

    Raises ``ConfigError`` where there is none, or a model of another kind.
    """
    folder = path
    if RunFolder(path).begun:
        stage = _last(path, lambda stage: stage.type == "reward_model")
        if stage is None:
            raise ConfigError(
                f"{path} has no reward model", expected="a run with a finished reward_model stage"
            )
        folder = RunFolder(path).require_checkpoint(stage)
    if not load_config(folder).scalar:
        raise ConfigError(
            f"{folder} holds a language model, which gives no score",
            expected="a reward model: the checkpoint of a reward_model stage, or one label in transformers",
        )
    weight_files(folder)
    return folder


def _last(run: Path, asked: Callable[[Stage], bool]) -> str | None:
    """Return the name of the run's last finished stage that ``asked`` is true of."""
    folder, recipe = RunFolder.open(run)
    folder.require_ledger()
    if not folder.ledger.exists():
        return None
    reader = LedgerReader(folder.ledger)
    try:
        done = {stage.name for stage in reader.stages() if stage.state == "done"}
    finally:
        reader.close()
    for stage in reversed(recipe.stages):
        if asked(stage) and stage.name in done:
            return stage.name
    return None


def load_renderer(folder: Path) -> ChatRenderer:
    """Return the chat renderer of a model folder."""
    return ChatRenderer(load_tokenizer(folder))


def context_tokens(folder: Path, limit: int = 4096) -> int:
    """Return the model's context length, at most ``limit`` tokens."""
    return min(limit, outline(folder).max_positions)


def _tiny() -> Path:
    folder = home() / TINY
    if not os.path.exists(folder / "model.safetensors"):
        from lehr.model.checkpoint import save_model
        from lehr.model.tiny import tiny_decoder

        ready_home()
        save_model(tiny_decoder(seed=0), folder, ByteTokenizer())
    return folder
