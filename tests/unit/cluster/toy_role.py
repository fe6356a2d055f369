"""A role for tests, built in a process of its own."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lehr.core.errors import ConfigError, LehrError


class ToyError(LehrError, RuntimeError):
    code = "toy"


class ToyTooLarge(ToyError):
    code = "toy_too_large"


@dataclass(frozen=True, slots=True)
class Pair:
    name: str
    values: NDArray[np.float32]


class Toy:
    def __init__(self, marker: Path) -> None:
        self._marker = marker
        self.calls = 0

    async def double(self, pair: Pair) -> Pair:
        return Pair(pair.name * 2, pair.values * 2)

    async def count(self) -> int:
        self.calls += 1
        return self.calls

    async def fail(self, kind: str) -> None:
        if kind == "large":
            raise ToyTooLarge("31 tokens do not fit", expected="at most 16")
        raise ZeroDivisionError("by zero")

    async def threads(self) -> dict[str, Any]:
        return {"omp": os.environ["OMP_NUM_THREADS"], "cores": sorted(os.sched_getaffinity(0))}

    async def hold(self, seconds: float) -> str:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            self._marker.write_text("cancelled")
            raise
        return "held"

    async def block(self, seconds: float) -> str:
        time.sleep(seconds)
        return "blocked"

    async def unsendable(self) -> Path:
        return self._marker

    async def close(self) -> None:
        self._marker.with_suffix(".closed").write_text("closed")


def make(config: dict[str, Any]) -> Toy:
    if config.get("refuse"):
        raise ConfigError("the folder /nowhere does not exist", hint="Check the path.")
    if config.get("exit"):
        print("last words")
        sys.stdout.flush()
        os._exit(3)
    if config.get("spawn"):
        import subprocess

        child = subprocess.Popen(["sleep", "300"])
        Path(config["marker"]).with_suffix(".child").write_text(str(child.pid))
    if config.get("slow"):
        time.sleep(float(config["slow"]))
    return Toy(Path(config["marker"]))
