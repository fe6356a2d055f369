"""Opens domains by name and hands out their problems."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import cast

from lehr.core.errors import ConfigError, LehrError, UnknownName
from lehr.core.task import Problem, Split
from lehr.domains.base import DomainCard, Environment, Source
from lehr.domains.card import BUILT_IN, CARD, find_cards
from lehr.domains.environments import ENVIRONMENTS
from lehr.domains.generator import failed, load_source
from lehr.sandbox import roots
from lehr.sandbox.images import declaration
from lehr.sandbox.taskbox import named_steps
from lehr.verify import verifiers
from lehr.verify.base import VERIFIERS


class Domain:
    """A domain on disk. Its code is loaded when it is first needed.

    digest: 8 hex digits over everything in the folder and the code of its generator; part of every task's
    id, so that an id names the same task always.
    """

    def __init__(self, card: DomainCard, folder: Path) -> None:
        self.card = card
        self.folder = folder

    def problem(self, split: Split, index: int) -> Problem:
        """Return problem ``index`` of ``split``; the same one for the same arguments always.

        Raises ``ConfigError`` for an index or split that the card does not have.
        """
        size = self.card.splits.get(split, 0)
        if not 0 <= index < size:
            raise ConfigError(
                f"{self.card.id} has no task {index} in split {split!r}", expected=f"an index below {size}"
            )
        made = self._make(split, index)
        name = f"{self.card.id}@{self.digest}/{split}/{index}"
        image = declaration.absolute(made.task.image, self.folder.resolve())
        return Problem(made.task.model_copy(update={"id": name, "image": image}), made.gold)

    def _make(self, split: Split, index: int) -> Problem:
        source = self._source
        try:
            made = cast(
                object, source.problem(self.card, split, index)
            )  # what a user wrote may return anything
        except LehrError:
            raise
        except (Exception, SystemExit) as error:  # the boundary to code that a user wrote
            if self.folder.is_relative_to(BUILT_IN):
                raise
            raise failed(self.card, self.folder, f"cannot make task {split}/{index}", error) from error
        if not isinstance(made, Problem):
            raise ConfigError(
                f"domain {self.card.id!r}: its source made {made!r:.80} of task {split}/{index}",
                expected="a lehr.core.task.Problem",
                hint=f"Correct `problem` of {self.card.generator} in {self.folder}.",
            )
        return made

    def require_usable(self) -> None:
        """Load the code and make a task of each split.

        Raises ``ConfigError`` or ``UnknownName`` that says what to correct: code that fails, an environment or
        a verifier that does not exist.
        """
        card = self.folder / CARD
        source = self._source  # first: it may register verifiers
        del source
        verifiers.register(VERIFIERS)
        for term in self.card.reward:
            if term.verifier not in set(VERIFIERS):
                raise UnknownName.among(
                    "verifier", term.verifier, VERIFIERS, hint=f"Correct `reward` in {card}."
                )
        if self.card.environment not in set(ENVIRONMENTS):
            raise UnknownName.among(
                "environment", self.card.environment, ENVIRONMENTS, hint=f"Correct `environment` in {card}."
            )
        for split, size in self.card.splits.items():
            if size > 0:
                self.problem(split, 0)

    def environment(self) -> Environment:
        """Return the environment that runs this domain's episodes."""
        return ENVIRONMENTS.get(self.card.environment)

    def make_ready(self, say: Callable[[str], object] = lambda _: None) -> None:
        """Build the image that the domain's boxes are made from, if a file declares one; ``say`` hears what is
        done. Raises ``ConfigError`` for a set-up step that is not declared, and what building raises.
        """
        image = declaration.absolute(self.card.image, self.folder.resolve())
        if self.card.setup:
            named_steps(image, self.card.setup)
        if declaration.locate(image):
            roots.make(image, say)

    @cached_property
    def digest(self) -> str:
        """8 hex digits of the domain's content."""
        digest = hashlib.blake2b(digest_size=4)
        for file in (*_content(self.folder), *self._shared_code()):
            inside = file.is_relative_to(self.folder)
            name = str(file.relative_to(self.folder)) if inside else file.name
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            digest.update(file.read_bytes())
        return digest.hexdigest()

    def _shared_code(self) -> list[Path]:
        """What a built-in generator consists of beside the domain's own folder."""
        module = self.card.generator.partition(":")[0]
        if not module.startswith("lehr.domains."):
            return []
        generator = BUILT_IN.joinpath(*module.split(".")[2:]).with_suffix(".py")
        files = (generator, BUILT_IN / "splitting.py")
        return [file for file in files if file.is_file() and not file.is_relative_to(self.folder)]

    @cached_property
    def _source(self) -> Source:
        return load_source(self.card, self.folder)


def find_domains(paths: Iterable[Path | str] = ()) -> dict[str, Domain]:
    """Return every domain whose card can be read, by id: built-in ones, those in ``./domains``, and those below
    ``paths``. Runs no code of theirs.
    """
    entries = sorted(find_cards(paths).items())
    return {n: Domain(e.card, e.folder) for n, e in entries if not isinstance(e.card, ConfigError)}


def open_domain(name: str, paths: Iterable[Path | str] = ()) -> Domain:
    """Return one domain that can be used: its code is loaded and made tasks.

    Raises ``UnknownName`` with near matches, or the error that says what is wrong with this domain.
    """
    found = find_cards(paths)
    if name not in found:
        for (
            entry
        ) in found.values():  # a card so broken that its id is not known: its folder's name speaks for it
            if isinstance(entry.card, ConfigError) and entry.folder.name == name.rpartition("/")[2]:
                raise entry.card
        hint = "`lehr domains list` shows all of them."
        if "*" in name:
            hint += " Patterns work for `lehr eval`; a recipe names its domains one by one."
        raise UnknownName.among("domain", name, found, hint=hint)
    entry = found[name]
    if isinstance(entry.card, ConfigError):
        raise entry.card
    domain = Domain(entry.card, entry.folder)
    domain.require_usable()
    return domain


def match_domains(patterns: Iterable[str], paths: Iterable[Path | str] = ()) -> list[str]:
    """Return the names that ``patterns`` stand for, each once: ``reasoning/*`` is every domain below
    ``reasoning``. Raises ``UnknownName`` for a pattern that fits none.
    """
    found = find_domains(tuple(paths))
    names: dict[str, None] = {}
    for pattern in patterns:
        fitting = fnmatch.filter(found, pattern) if "*" in pattern else [pattern]
        if not fitting:
            raise UnknownName.among("domain", pattern, found, hint="`lehr domains list` shows all of them.")
        names.update(dict.fromkeys(fitting))
    return list(names)


def _content(folder: Path) -> list[Path]:
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and not file.name.startswith(".")
    )
