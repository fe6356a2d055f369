"""Both sides of a benchmark: processes of their own that take turns, and the environments that peers need."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TRL = ("trl==1.16.0", "torch==2.13.0")
ANSWER_S = 900
"""Seconds that a measured step may take."""


def environment(name: str, pins: tuple[str, ...]) -> Path:
    """Return the interpreter of an environment that holds ``pins``, made if it is not there."""
    folder = HERE / ".venvs" / name
    python, stamp = folder / "bin" / "python", folder / "pins"
    if not stamp.exists() or stamp.read_text() != "\n".join(pins):
        print(f"    installing {', '.join(pins)} into {folder.relative_to(HERE.parent)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        extra = os.environ.get("PIP_ARGS", "").split()
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--no-compile", *extra, *pins], check=True)
        stamp.write_text("\n".join(pins))
    return python


def trl_python() -> Path:
    """Return an interpreter that has TRL: this one where that is installed, else one of its own."""
    return Path(sys.executable) if find_spec("trl") else environment("trl", TRL)


class Worker:
    """A process that takes one measured step per line of its standard input."""

    def __init__(self, command: list[str], job: dict[str, Any]) -> None:
        env = os.environ | {"OMP_NUM_THREADS": str(job["threads"]), "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, cwd=HERE.parent
        )
        self._say(json.dumps(job))
        self.ready = self._hear()

    def go(self) -> dict[str, Any]:
        """Take a step; return ``seconds``, ``cpu_s`` and sampled ``tokens``."""
        self._say("go")
        return self._hear()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], ANSWER_S)[0]:
            self.close()
            raise RuntimeError(f"{self._process.args} gave no answer within {ANSWER_S} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self._process.args} ended with status {self._process.wait()}")
        return json.loads(line)


def forget_peak() -> None:
    """Start the count of peak memory of this process anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """Return the most memory that this process has held since :func:`forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) << 10
