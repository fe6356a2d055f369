"""Which host users boxes run as."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path

FIRST_UID, RANGES, RANGE = 0x7000_0000, 256, 1 << 16
"""Host user numbers of boxes when started by root: beyond every range that systemd or subuid hand out."""
SMALLEST_SPAN = 64


@dataclass(frozen=True, slots=True)
class Users:
    """The host's user numbers of one zygote: its own is ``first``, its boxes have two each of the rest.

    count: how many there are. 1: all share this user's only number.
    """

    first: int
    count: int

    @property
    def apart(self) -> bool:
        """Whether a box's runner and its programs are different users."""
        return self.count > 1

    @property
    def other(self) -> int | None:
        """The user to start bubblewrap as, None for this process's own."""
        return self.first if self.apart else None


def choose_users() -> Users:
    """Return a range of its own if this is root, else the user's own number."""
    if os.geteuid() != 0:
        return Users(os.geteuid(), 1)
    spans = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    inside, _, size = max(spans, key=lambda span: span[2])
    if inside + size > FIRST_UID + RANGES * RANGE:
        return Users(FIRST_UID + secrets.randbelow(RANGES) * RANGE, RANGE)
    if size >= SMALLEST_SPAN:  # root of a user namespace: a part of the upper half of what was mapped to it
        part = min(RANGE, size // 16)
        return Users(inside + size // 2 + secrets.randbelow(size // 2 // part) * part, part)
    return Users(0, 1)
