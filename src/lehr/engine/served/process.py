"""A server's process: started with a token on a loopback port, awaited, ended with all that it started."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lehr.core.errors import DeadlineExceeded, LehrError, MissingDependency, RoleLost

INSIDE = Path(__file__).with_name("inside")
"""Modules that run in the server's own environment."""
HOST = "127.0.0.1"
_GRACE_S = 15.0
_TAIL_LINES = 12


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. python: the interpreter of the server's environment. module: as in ``python -m``."""

    python: Path
    module: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    install: str
    """The command that makes the environment."""


class ServerProcess:
    """One server. It ends with the thread that started it, at the latest."""

    def __init__(self, name: str, command: Command, log: Path | None = None) -> None:
        """Start the process; :meth:`ready` awaits it. ``log`` gets what it prints."""
        if not command.python.exists():
            raise MissingDependency(
                f"there is no {name} environment at {command.python}", hint=f"Run: {command.install}"
            )
        self.name = name
        self.token = secrets.token_urlsafe(32)
        self.url = f"http://{HOST}:{(port := free_port())}"
        self._log = log or Path(tempfile.mkdtemp(prefix=f"lehr-{name}-")) / "log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        environment = {
            **clean,
            **command.environment,
            "LEHR_SERVER_TOKEN": self.token,
            "LEHR_PARENT": str(os.getpid()),
        }
        wrapper = [str(command.python), str(INSIDE / "serve.py"), command.module]
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen(
                [*wrapper, *command.arguments, "--host", HOST, "--port", str(port)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self._log.parent,
            )

    @property
    def pid(self) -> int:
        """Of the process, and of the group that it leads."""
        return self._process.pid

    async def ready(self, probe: Callable[[], Awaitable[object]], timeout_s: float) -> None:
        """Return once ``probe`` succeeds. Raises :class:`RoleLost` with the log's end if the process ends."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.check()
            try:
                await probe()
                return
            except LehrError:
                pass  # not yet
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{self.name} was not ready after {timeout_s:g} s; {self._tail()}")
            await asyncio.sleep(0.25)

    def check(self) -> None:
        """Raise :class:`RoleLost` if the process has ended."""
        if self._process.poll() is not None:
            raise RoleLost(f"{self.name} ended with {self._process.returncode}; {self._tail()}")

    async def end(self) -> None:
        """End the process and what it started: politely, then by force. Idempotent."""
        for number, patience_s in ((signal.SIGTERM, _GRACE_S), (signal.SIGKILL, 5.0)):
            if self._process.poll() is not None:
                break
            self._signal(number)
            deadline = time.monotonic() + patience_s
            while self._process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
        self._signal(signal.SIGKILL)  # whatever is left of its group

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # the group is empty

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()
        telling = [line for line in lines if "rror" in line] or lines
        return f"its log {self._log} ends with:\n  " + "\n  ".join(
            line[:300] for line in telling[-_TAIL_LINES:]
        )


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def flags(options: Mapping[str, object]) -> Sequence[str]:
    """Return command-line words: None leaves an option out, True gives ``--name``, False ``--no-name``."""
    words: list[str] = []
    for name, value in options.items():
        if value is True or value is False:
            words.append(f"--{name}" if value else f"--no-{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words
