"""Finds and reads ``domain.toml`` files without importing any domain's code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from lehr.core.config import load
from lehr.core.errors import ConfigError
from lehr.core.task import Message, Split, Task
from lehr.domains.base import DomainCard

CARD = "domain.toml"
BUILT_IN = Path(__file__).parent
LOCAL = Path("domains")
_ID = re.compile(r"""^\s*id\s*=\s*["']([^"'\n]+)["']""", re.MULTILINE)


def read_card(folder: Path) -> DomainCard:
    """Return the card of a domain folder. Raises ``ConfigError`` that names the file and the key."""
    return load(DomainCard, folder / CARD)


@dataclass(frozen=True, slots=True)
class Entry:
    """A domain folder that was found.

    card: what stands in its ``domain.toml``, or the error for one that cannot be used.
    replaces_built_in: whether a built-in domain has the same id and is hidden by this one.
    """

    id: str
    folder: Path
    card: DomainCard | ConfigError
    replaces_built_in: bool = False


def find_cards(paths: Iterable[Path | str] = ()) -> Mapping[str, Entry]:
    """Return what was found by id: the built-in domains, those in ``./domains``, and those below ``paths``.

    A later one replaces an earlier one of the same id; two folders of one search path that share an id are both
    unusable. A card that cannot be read is an entry like others, under the id that it claims or else under
    the name of its folder. Raises ``ConfigError`` for a path that does not exist.
    """
    found: dict[str, Entry] = {}
    for path in (BUILT_IN, LOCAL, *map(Path, paths)):
        if not path.exists():
            if path is LOCAL:
                continue
            raise ConfigError(f"no such folder: {path}", expected=f"a folder that holds a {CARD}")
        here: dict[str, Entry] = {}
        for folder in _folders(path):
            entry = _entry(folder, path)
            if (other := here.get(entry.id)) is not None:
                error = ConfigError(
                    f"domain {entry.id!r} stands in {other.folder} and in {folder}",
                    expected="one folder for each id",
                    hint=f"Change `id` in one {CARD}, or remove a folder.",
                )
                entry = replace(entry, card=error)
            here[entry.id] = entry
        hidden = set(built_in_ids() if path is not BUILT_IN else ())
        found.update({name: replace(e, replaces_built_in=name in hidden) for name, e in here.items()})
    return found


@cache
def built_in_ids() -> frozenset[str]:
    """Return the ids of the domains that come with lehr."""
    return frozenset(_entry(folder, BUILT_IN).id for folder in _folders(BUILT_IN))


def _entry(folder: Path, below: Path) -> Entry:
    try:
        card = read_card(folder)
    except ConfigError as error:
        return Entry(_claimed_id(folder) or _name_of(folder, below), folder, error)
    return Entry(card.id, folder, card)


def _name_of(folder: Path, below: Path) -> str:
    return folder.name if folder == below else folder.relative_to(below).as_posix()


def _claimed_id(folder: Path) -> str:
    try:
        found = _ID.search((folder / CARD).read_text())
    except (OSError, ValueError):
        return ""
    return found[1] if found else ""


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
