"""Which engine has computed which beginnings of prompts, as far as requests tell.

A prompt is known by the hashes of its beginnings, of one chunk, two chunks and so on (each hash goes on from
the one before), and of the whole. What is remembered is where a request was sent, not what its engine still has
in its cache.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from lehr.engine.bounds import packed_ids

CHUNK = 64
"""Tokens by which beginnings are told apart."""
REMEMBERED = 1 << 16
"""Beginnings that are remembered: those used last."""


class Beginning(NamedTuple):
    """Hash of the first ``tokens`` tokens of a prompt."""

    key: bytes
    tokens: int


class Found(NamedTuple):
    """The longest beginning that anybody knows, and who. whole: it is the prompt itself."""

    members: frozenset[int]
    tokens: int = 0
    whole: bool = False


NOBODY = Found(frozenset())


class Prefixes:
    """Remembers where beginnings were computed; members are numbers."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._places: OrderedDict[bytes, frozenset[int]] = OrderedDict()

    def find(self, chain: Sequence[Beginning], among: Collection[int]) -> Found:
        """Return the longest beginning in ``chain`` that a member ``among`` those given has seen."""
        for position, (key, tokens) in zip(range(len(chain), 0, -1), reversed(chain), strict=True):
            members = self._places.get(key, frozenset[int]()) & frozenset(among)
            if members:
                return Found(members, tokens, position == len(chain))
        return NOBODY

    def note(self, chain: Sequence[Beginning], member: int) -> None:
        """Remember that ``member`` computes a prompt, the shortest beginning last: it is the most shared."""
        for key, _ in reversed(chain):
            self._places[key] = self._places.get(key, frozenset()) | {member}
            self._places.move_to_end(key)
        while len(self._places) > self._remembered:
            self._places.popitem(last=False)

    def forget(self, member: int) -> None:
        """Forget everything of a member, whose cache is gone."""
        self._places = OrderedDict(
            (key, left) for key, members in self._places.items() if (left := members - {member})
        )

    def clear(self) -> None:
        """Forget everything: new weights, new keys and values."""
        self._places.clear()


def beginnings(tokens: Sequence[int]) -> list[Beginning]:
    """Return the beginnings of a prompt, the shortest first; the last is the whole of it."""
    ids = packed_ids(tokens)
    chain: list[Beginning] = []
    key = b""
    for end in [*range(CHUNK, len(ids), CHUNK), len(ids)]:
        start = chain[-1].tokens if chain else 0
        key = hashlib.blake2b(key + ids[start:end].tobytes(), digest_size=16).digest()
        chain.append(Beginning(key, end))
    return chain
