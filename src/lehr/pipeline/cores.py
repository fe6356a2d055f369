"""Divides the processor between sampler and trainer on purpose, instead of letting them fight."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Allotment:
    """What one role may use."""

    threads: int
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Division:
    """Who gets which cores. ``sampling`` and ``training`` hold when one works alone; ``shared_*`` when
    both work at the same time.
    """

    sampling: Allotment
    training: Allotment
    shared_sampling: Allotment
    shared_training: Allotment


def divide(cores: tuple[int, ...] | None = None) -> Division:
    """Split the cores that this process may use: half each while both work, all for one that works alone.

    On a single core both share it.
    """
    available = cores or tuple(sorted(os.sched_getaffinity(0)))
    whole = Allotment(len(available), available)
    if len(available) == 1:
        return Division(whole, whole, whole, whole)
    half = len(available) // 2
    return Division(
        whole, whole, Allotment(half, available[:half]), Allotment(len(available) - half, available[half:])
    )
