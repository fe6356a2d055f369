"""What travels between an engine's process and its callers."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lehr.core.trace import Sampling, Version
from lehr.engine.base import InFlight


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Ask for one completion of ``tokens`` (int32)."""

    tokens: NDArray[np.int32]
    sampling: Sampling = field(default_factory=Sampling)
    session: str = ""
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Ask for the log-probability of every token after the first."""

    tokens: NDArray[np.int32]
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class ActivateRequest:
    """Switch to fetched weights."""

    version: Version
    in_flight: InFlight = "keep"


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """End the requests of a session, or all with ``session=""``."""

    session: str = ""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Load an adapter from a folder that the engine's process can read, under a name that requests say."""

    name: str
    folder: str


@dataclass(frozen=True, slots=True)
class UnloadAdapter:
    """Refuse new requests that name an adapter, and free it."""

    name: str


@dataclass(frozen=True, slots=True)
class Allotment:
    """How much of the machine a role may use from now on. cores: () leaves the pinning as it is."""

    threads: int
    cores: tuple[int, ...] = ()

    def divided(self, count: int) -> list[Allotment]:
        """Return ``count`` parts: cores of their own where there are enough, else all share the cores."""
        threads = max(1, self.threads // count)
        if len(self.cores) < count:
            return [Allotment(threads, self.cores)] * count
        return [Allotment(threads, self.cores[number::count]) for number in range(count)]
