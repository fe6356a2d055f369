"""Loads the code behind a card. What goes wrong in a user's file names the domain, the file and the line."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Protocol, cast, runtime_checkable

from lehr.core.errors import ConfigError, LehrError
from lehr.domains.base import DomainCard, Source
from lehr.domains.card import BUILT_IN

SHOWN_CHARACTERS = 300


@runtime_checkable
class FolderSource(Protocol):
    """A source that reads files of its domain's folder."""

    def bind(self, folder: Path) -> Source:
        """Return the source for the domain that stands in ``folder``."""
        ...


def load_source(card: DomainCard, folder: Path) -> Source:
    """Return the source that ``card.generator`` names.

    Raises ``ConfigError`` for a name that leads nowhere, for code that fails while it is loaded, and for an
    object that makes no problems. Errors of the tree that the code raises pass unchanged.
    """
    module_name, colon, attribute = card.generator.partition(":")
    mend = f"Correct `generator` in {folder / 'domain.toml'}."
    if not colon or not attribute:
        raise ConfigError(
            f"domain {card.id!r}: cannot read generator {card.generator!r}",
            expected="module:object or file.py:object",
            hint=mend,
        )
    try:
        module = _load_file(folder / module_name) if module_name.endswith(".py") else _import(module_name)
    except LehrError:
        raise
    except _Absent as error:
        raise ConfigError(
            f"domain {card.id!r}: the generator {card.generator!r} cannot be loaded: {error}", hint=mend
        ) from error
    except (Exception, SystemExit) as error:  # the boundary to code that a user wrote
        if folder.is_relative_to(BUILT_IN):
            raise
        raise failed(card, folder, "cannot be loaded", error) from error
    if not hasattr(module, attribute):
        names = [name for name in vars(module) if not name.startswith("_")]
        near = difflib.get_close_matches(attribute, names, n=3, cutoff=0.5)
        raise ConfigError(
            f"domain {card.id!r}: {module.__file__ or module_name} has no {attribute!r}",
            expected=" or ".join(map(repr, near)) or f"a source of problems called {attribute!r} in it",
            hint=mend,
        )
    source = getattr(module, attribute)
    if isinstance(source, FolderSource):
        return source.bind(folder)
    if isinstance(source, type) or not callable(getattr(source, "problem", None)):
        kind = (
            f"the class {source.__name__}" if isinstance(source, type) else f"of type {type(source).__name__}"
        )
        raise ConfigError(
            f"domain {card.id!r}: {attribute!r} in {module.__file__ or module_name} is {kind}",
            expected="an object with a method `problem(card, split, index)`",
            hint=mend,
        )
    return cast(Source, source)


def failed(card: DomainCard, folder: Path, what: str, error: BaseException) -> ConfigError:
    """Return the error for code of ``folder`` that raised: where it stood, and what it said."""
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    text = " ".join(text.split())[:SHOWN_CHARACTERS]
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return ConfigError(
        f"domain {card.id!r} {what}: {_place(error, folder)}: {said}",
        hint=f"Correct that line, then look with `lehr domains show {card.id}`.",
    )


class _Absent(Exception):
    """What the generator names is not there, as opposed to being there and failing."""


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise _Absent(str(error)) from error
        raise


def _load_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise _Absent(f"no such file: {file}")
    name = f"lehr_domain_{hashlib.blake2b(str(file.resolve()).encode(), digest_size=8).hexdigest()}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise _Absent(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _place(error: BaseException, folder: Path) -> str:
    """Return the file and line that failed: the innermost one of the domain's own where there is one."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).resolve().is_relative_to(folder.resolve())]
    if not frames:
        return str(folder)
    frame = (own or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}"
