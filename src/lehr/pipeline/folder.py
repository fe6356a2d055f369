"""The run folder: where everything that a run leaves behind lies."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from lehr.core.config import digest_of, resolve
from lehr.core.errors import ConfigError, HostUnfit, OutOfSpace
from lehr.pipeline.recipe import Recipe

MIN_FREE_BYTES = 512 << 20
SHARED_MEMORY = Path("/dev/shm")


class RunFolder:
    """Paths of a run. Creating one writes ``config.json``; opening one reads it.

    digest: of the recipe as it was recorded, also where a newer version has keys that it lacks.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.ledger = path / "ledger.sqlite"
        self.blobs = path / "blobs"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.digest = ""
        self._lock: int | None = None

    @classmethod
    def create(cls, path: Path, recipe: Recipe) -> RunFolder:
        """Make a new run folder. Refuses one that already holds a run."""
        folder = cls(path)
        try:
            if folder.config.exists():
                raise ConfigError(
                    f"{path} already holds a run",
                    hint=f"Resume it with `lehr runs resume {path}` or name another folder.",
                )
            path.mkdir(parents=True, exist_ok=True)
            folder.require_space()
            for part in (folder.blobs, folder.checkpoints, folder.logs):
                part.mkdir(exist_ok=True)
            folder.digest = recipe.digest()
            body = {"digest": folder.digest, "started": time.time(), "recipe": recipe.model_dump(mode="json")}
            replace_text(folder.config, json.dumps(body, indent=2) + "\n")
        except OSError as error:
            raise unusable(error, path) from error
        return folder

    @classmethod
    def open(cls, path: Path) -> tuple[RunFolder, Recipe]:
        """Read an existing run folder."""
        folder = cls(path)
        try:
            text = folder.config.read_text()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ConfigError(
                f"{path} is not a run folder (no config.json)", hint="`lehr runs list` shows the runs here."
            ) from error
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read {folder.config}: {getattr(error, 'strerror', None) or error}",
                expected="the file that a run wrote there",
                hint="Check who may read it, or put it back from a copy.",
            ) from error
        try:
            body: dict[str, Any] = json.loads(text)
            found = digest_of(body["recipe"])
            recipe = resolve(Recipe, body["recipe"], where=str(folder.config))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"cannot read {folder.config}: {error}",
                expected="the file that a run wrote there",
                hint="Put the file back from a copy, or start a new run in another folder with `lehr train`.",
            ) from error
        if found != body.get("digest"):
            raise ConfigError(
                f"{folder.config} was edited: its digest is {found}, recorded {body.get('digest')}",
                hint="Restore the file, or start a new run with the changed recipe.",
            )
        folder.digest = found
        return folder, recipe

    def checkpoint(self, stage: str, step: int | None = None) -> Path:
        """Return the folder of a stage's final checkpoint, or of one inside it."""
        return self.checkpoints / (stage if step is None else f"{stage}-step-{step:04d}")

    def require_checkpoint(self, stage: str, step: int | None = None) -> Path:
        """Return the folder of a checkpoint that was recorded. Raises ``ConfigError`` if it is gone."""
        path = self.checkpoint(stage, step)
        if not (path / "config.json").exists():
            raise ConfigError(
                f"the checkpoint of stage {stage!r} of {self.path} is missing",
                expected=f"the model that the stage left in {path}",
                hint="Put the folder back from a copy, or train again in another folder.",
            )
        return path

    @property
    def begun(self) -> bool:
        """Whether a run lies here, be it damaged."""
        return self.ledger.exists() or (self.blobs.is_dir() and self.checkpoints.is_dir())

    def require_ledger(self) -> None:
        """Raise ``ConfigError`` if work was done here and its record is gone or empty. A run that was stopped
        before it recorded anything has none, and may begin.
        """
        log = self.ledger.with_name(self.ledger.name + "-wal")
        if any(file.exists() and file.stat().st_size for file in (self.ledger, log)):
            return
        left = [self.metrics, *self.blobs.glob("*"), *self.checkpoints.glob("*")]
        if found := next((path for path in left if path.exists()), None):
            state = "empty" if self.ledger.exists() else "missing"
            raise ConfigError(
                f"{self.ledger} is {state}, the record of what this run did",
                expected=f"the ledger that belongs to {found}",
                hint="Put the file back from a copy, or start a new run in another folder with `lehr train`.",
            )

    def weights(self, model_bytes: int) -> Path:
        """Return an empty folder for published weights: in memory where three sets of ``model_bytes`` fit,
        else inside the run. What killed runs left in memory is removed: a folder is locked while its run lives.
        """
        sweep(SHARED_MEMORY)
        self.discard_weights()
        memory, inside = self._weights()
        fits = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 3 * model_bytes
        chosen = memory if fits else inside
        try:
            chosen.mkdir(mode=0o700)
            self._lock = lock(chosen)
        except OSError as error:
            raise out_of_space(error, chosen) from error
        return chosen

    def discard_weights(self) -> None:
        """Remove the folder of published weights and give up its lock."""
        for folder in self._weights():
            shutil.rmtree(folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _weights(self) -> tuple[Path, Path]:
        name = hashlib.blake2b(str(self.path.resolve()).encode(), digest_size=6).hexdigest()
        return SHARED_MEMORY / f"lehr-{os.getuid()}-{name}", self.path / "weights"

    def remove_checkpoint(self, name: str) -> None:
        """Delete an intermediate checkpoint that a newer one replaces."""
        shutil.rmtree(self.checkpoints / name, ignore_errors=True)

    def require_space(self) -> None:
        """Raise :class:`OutOfSpace` before work is begun that could not be saved."""
        stat = os.statvfs(self.path)
        free = stat.f_bavail * stat.f_frsize
        if free < MIN_FREE_BYTES:
            raise OutOfSpace(
                f"only {free >> 20} MiB are free at {self.path}",
                expected=f"at least {MIN_FREE_BYTES >> 20} MiB",
                hint="Free some space, or name a folder on another disk.",
            )


def lock(folder: Path) -> int | None:
    """Lock a folder until this process ends; return the descriptor, None if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def sweep(memory: Path) -> None:
    """Remove this user's folders of published weights that no living run holds."""
    for old in memory.glob(f"lehr-{os.getuid()}-*"):
        try:
            descriptor = lock(old)
        except OSError:
            continue  # gone by now, a link, or another user's
        if descriptor is not None:
            shutil.rmtree(old, ignore_errors=True)
            os.close(descriptor)


def out_of_space(error: OSError, path: Path) -> OSError:
    """Return ``error`` as :class:`OutOfSpace` if that is what it is, else unchanged."""
    if error.errno in (28, 122):
        return OutOfSpace(f"no space left while writing {path}", hint="Free some space and resume the run.")
    return error


def unusable(error: OSError, path: Path) -> OSError | HostUnfit | ConfigError:
    """Return why no run can be made at ``path``, as an error that says what to do about it."""
    if isinstance(error, FileExistsError | NotADirectoryError):
        return ConfigError(
            f"cannot make the run folder {path}: a file is in its place",
            expected="a folder, or a path where nothing is yet",
            hint="Name another folder with --run.",
        )
    named = out_of_space(error, path)
    if named is not error or isinstance(error, OutOfSpace):
        return named
    return HostUnfit(
        f"cannot make the run folder {path}: {error.strerror}",
        expected="a folder that may be written to",
        hint="Name another folder with --run.",
    )


def replace_text(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    temporary.replace(path)
