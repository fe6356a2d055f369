"""Keeps splits apart: by random stream, and by the shape of a task."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import TypeVar

from lehr.core.errors import ConfigError
from lehr.core.task import Split

T = TypeVar("T")
ATTEMPTS = 2000


def stream(domain: str, split: Split, index: int, attempt: int = 0) -> random.Random:
    """Return the random stream of one task; no two splits share one."""
    return random.Random(f"{domain}/{split}/{index}/{attempt}")


def home_of(shape: str) -> Split:
    """Return the split that owns a shape (a composition, a question): 3 of 4 train, 1 of 12 validation,
    1 of 6 held out.
    """
    place = int.from_bytes(hashlib.blake2b(shape.encode(), digest_size=4).digest(), "big") % 12
    return "train" if place < 9 else "validation" if place == 9 else "heldout"


def draw_for(
    domain: str, split: Split, index: int, make: Callable[[random.Random], tuple[str, T]]
) -> tuple[random.Random, T]:
    """Draw from ``make`` until the shape that it names belongs to ``split``; return the stream and the draw.

    A shape of "" belongs to every split.
    """
    for attempt in range(ATTEMPTS):
        rng = stream(domain, split, index, attempt)
        shape, made = make(rng)
        if not shape or home_of(shape) == split:
            return rng, made
    raise ConfigError(f"{domain}: no task of split {split!r} found in {ATTEMPTS} draws")
