"""Finds and reads ``domain.toml`` files without importing any domain's code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lehr.core.config import load
from lehr.core.errors import ConfigError
from lehr.core.task import Message, Split, Task
from lehr.domains.base import DomainCard

CARD = "domain.toml"
BUILT_IN = Path(__file__).parent
LOCAL = Path("domains")


def read_card(folder: Path) -> DomainCard:
    """Return the card of a domain folder. Raises ``ConfigError`` that names the file and the key."""
    return load(DomainCard, folder / CARD)


def find_cards(paths: Iterable[Path | str] = ()) -> Mapping[str, tuple[DomainCard, Path]]:
    """Return (card, folder) by id: the built-in domains, those in ``./domains``, and those below ``paths``.

    A later one replaces an earlier one of the same id, except that two folders of one search path must
    differ. Raises ``ConfigError`` for a path that does not exist or a card that cannot be read.
    """
    found: dict[str, tuple[DomainCard, Path]] = {}
    for path in (BUILT_IN, LOCAL, *map(Path, paths)):
        if not path.exists():
            if path is LOCAL:
                continue
            raise ConfigError(f"no such folder: {path}", expected=f"a folder that holds a {CARD}")
        here: dict[str, tuple[DomainCard, Path]] = {}
        for folder in _folders(path):
            card = read_card(folder)
            if card.id in here:
                raise ConfigError(f"domain {card.id!r} stands in {here[card.id][1]} and in {folder}")
            here[card.id] = (card, folder)
        found.update(here)
    return found


def _folders(path: Path) -> Iterator[Path]:
    if (path / CARD).is_file():
        yield path
        return
    yield from sorted(file.parent for file in path.rglob(CARD))


def task_of(
    card: DomainCard, split: Split, index: int, *, system: str, user: str, level: int = 0, **fields: Any
) -> Task:
    """Return a task with the card's limits, surroundings and terms, and a system and a user message. The
    catalogue puts the digest of the domain into its id.
    """
    surroundings: dict[str, Any] = {
        "image": card.image,
        "setup": card.setup,
        "allow_hosts": card.allow_hosts,
    }
    return Task(
        id=f"{card.id}/{split}/{index}",
        domain=card.id,
        messages=(Message(role="system", content=system), Message(role="user", content=user)),
        reward=card.reward,
        resources=card.resources,
        timeout_s=card.timeout_s,
        max_turns=card.max_turns,
        max_tokens=card.max_tokens,
        level=level,
        **{**surroundings, **fields},
    )
