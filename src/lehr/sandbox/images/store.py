"""Where built images are kept, and what is recorded of each.

images/DIGEST/rootfs        the image; of one that stands on ``host``, only what it adds
images/DIGEST/image.json    what it was built from; an unpacked archive has none
images/logs/DIGEST.log      what its build printed, also of one that failed; locked while it is built
images/building-…           a build at work; locked by its builder, swept once nobody holds it
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lehr.core.errors import HostUnfit

FACTS = "image.json"
ROOT = "rootfs"
BUILDING, REMOVING = "building-", "removing-"
SWEEP_AFTER_S = 10.0
"""How old what nobody holds must be: its maker may just be about to lock it."""
KEEP_LOGS_S = 7 * 86_400.0
"""How long the log of a build is kept whose image is not there."""
DIGITS = 32


@dataclass(frozen=True, slots=True)
class Built:
    """A built image.

    digest: of everything that it was made from. host: whether it stands on the host's system folders, so that
    ``root`` holds only what it adds. env: variables of its programs. packages: whether pip put something into
    the folder of its own. how: ``overlay``, ``copy`` or ``new``. own_bytes: what it holds beyond its base.
    """

    name: str
    key: str
    digest: str
    base: str
    host: bool
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    packages: bool = False
    how: str = "copy"
    own_bytes: int = 0
    seconds: float = 0.0
    made_at: float = 0.0

    @property
    def root(self) -> Path:
        """Its root folder."""
        return images_folder() / self.digest / ROOT

    @property
    def log(self) -> Path:
        """What its build printed."""
        return log_of(self.digest)


def home_folder() -> Path:
    """Return where images and their declarations are kept: ``$LEHR_HOME``, else ``/var/lib/lehr`` for root,
    whose home boxes cannot pass, and ``~/.cache/lehr`` for others.
    """
    base = os.environ.get("LEHR_HOME")
    usual = Path("/var/lib/lehr") if os.geteuid() == 0 else Path.home() / ".cache" / "lehr"
    return Path(base).absolute() if base else usual


def images_folder() -> Path:
    """Return where built images and unpacked archives are kept."""
    return home_folder() / "images"


def log_of(digest: str) -> Path:
    """Return the file that a build prints to."""
    return images_folder() / "logs" / f"{digest}.log"


def find(digest: str) -> Built | None:
    """Return the built image of a digest, or None; a damaged one counts as none."""
    try:
        facts: dict[str, Any] = json.loads((images_folder() / digest / FACTS).read_text())
        built = Built(**facts)
    except (OSError, ValueError, TypeError):
        return None
    whole = isinstance(built.env, dict) and built.digest == digest and built.root.is_dir()
    return built if whole else None


def write(folder: Path, built: Built) -> None:
    """Record what an image was built from."""
    (folder / FACTS).write_text(json.dumps(asdict(built), indent=1, sort_keys=True) + "\n")


def kept() -> list[tuple[Path, Built | None]]:
    """Return every image that is kept, with what it was built from; None for an unpacked archive."""
    store = images_folder()
    if not store.is_dir():
        return []
    folders = [path for path in sorted(store.iterdir()) if _is_image(path)]
    return [(path, find(path.name)) for path in folders]


def _is_image(path: Path) -> bool:
    return len(path.name) == DIGITS and ((path / ROOT).is_dir() or (path / FACTS).is_file())


def remove(folder: Path) -> None:
    """Remove an image at once for others, then from disk. Boxes that stand on it lose their files."""
    gone = folder.with_name(f"{REMOVING}{folder.name}-{os.getpid()}")
    try:
        os.rename(folder, gone)
    except FileNotFoundError:
        return
    discard(gone)
    log_of(folder.name).unlink(missing_ok=True)


def discard(folder: Path) -> None:
    """Remove a folder, also the parts of it that its own user may not read."""

    def open_up(_: Callable[..., Any], path: str, __: object) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), stat.S_IRWXU)
            if os.path.isdir(path) and not os.path.islink(path):  # a file may be shared by another image
                os.chmod(path, stat.S_IRWXU)
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)

    shutil.rmtree(folder, onerror=open_up)


@contextlib.contextmanager
def building(digest: str) -> Generator[Path]:
    """Yield a folder for a build, locked as long as this process works on it, and remove what is left of it."""
    store = images_folder()
    folder = Path(tempfile.mkdtemp(dir=store, prefix=f"{BUILDING}{digest[:12]}-"))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        discard(folder)
        os.close(lock)


def make_ready() -> None:
    """Make the folders, and remove what builds left that were killed. Raises ``HostUnfit``."""
    store = images_folder()
    try:
        (store / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        hint = "Set LEHR_HOME to a folder that you own."
        raise HostUnfit(f"cannot write to {store}: {error.strerror}", hint=hint) from error
    for pattern in (BUILDING, REMOVING):
        for folder in store.glob(f"{pattern}*"):
            _sweep(folder)
    for log in (store / "logs").glob("*.log"):
        with contextlib.suppress(OSError):
            if not (store / log.stem).exists() and time.time() - log.stat().st_mtime > KEEP_LOGS_S:
                log.unlink()


def _sweep(folder: Path) -> None:
    try:
        if time.time() - folder.stat().st_mtime < SWEEP_AFTER_S:
            return
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # somebody works on it
    else:
        discard(folder)
    finally:
        os.close(lock)
