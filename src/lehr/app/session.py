"""What one invocation of the command line knows about itself."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Session:
    """Filled in as a command goes on, so that the error boundary can say how to go on after a failure.

    run: the run folder at work, once there is one.
    command: the command that was typed, with the one below it, such as ``lehr domains show``.
    stopped_by: the signal that asked the program to stop, if one did.
    """

    debug: bool = False
    run: Path | None = None
    command: str = "lehr"
    stopped_by: int = signal.SIGINT

    @property
    def resume_command(self) -> str | None:
        """The command that goes on with the run, if there is a run to go on with."""
        if self.run is None or not (self.run / "config.json").exists():
            return None
        return f"lehr runs resume {shown(self.run)}"


def shown(path: Path) -> str:
    """Return ``path`` as a person in the current folder would type it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def state_folder() -> Path:
    """Return the folder for logs that belong to no run: ``$LEHR_HOME/logs``, else ``$XDG_STATE_HOME/lehr`` or
    ``~/.local/state/lehr``.
    """
    own = os.environ.get("LEHR_HOME")
    if own:
        return Path(own) / "logs"
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "lehr"
