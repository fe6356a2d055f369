"""Where this host lets boxes be limited by control groups.

Version 1, version 2 and hybrid hosts look alike from outside: :func:`find_places` returns where new groups may
be made for each controller. A folder's name carries its owner's process, so that what a killed owner left
behind is found by :func:`sweep`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lehr.sandbox.owner import namespace, owner, owner_ended

NEEDED = ("memory", "pids")
WANTED = ("memory", "pids", "cpu", "cpuacct")
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Place:
    """A folder in which groups for one controller can be made."""

    version: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Places:
    """Where this process may make groups.

    controllers: by name, those it may use. lacking: by controller, why it cannot be used.
    """

    version: str
    controllers: Mapping[str, Place] = field(default_factory=dict[str, Place])
    lacking: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def usable(self) -> bool:
        """Whether memory and processes can be limited."""
        return all(name in self.controllers for name in NEEDED)


def mounts(text: str) -> list[tuple[str, str, str, str]]:
    """Return (kind, root, mount point, options) of each cgroup mount in a ``mountinfo``."""
    found: list[tuple[str, str, str, str]] = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        kind, _source, options = [*right.split(" ", 2), "", ""][:3]
        if kind in ("cgroup", "cgroup2"):
            fields = left.split()
            found.append((kind, fields[3], fields[4].replace("\\040", " "), options))
    return found


def own_paths(text: str) -> dict[str, str]:
    """Return this process's path per version 1 controller, and under ``""`` for version 2."""
    paths: dict[str, str] = {}
    for line in text.splitlines():
        _, names, path = line.split(":", 2)
        for name in names.split(","):
            paths[name] = path
    return paths


def _below(root: str, point: str, path: str) -> Path:
    inner = path[len(root) :] if root != "/" and path.startswith(root) else path
    return Path(point) / inner.lstrip("/") if root == "/" or path.startswith(root) else Path(point)


@functools.cache
def find_places() -> Places:
    """Look at this host once. Removes what dead owners left behind."""
    text = Path("/proc/self/mountinfo").read_text()
    paths = own_paths(Path("/proc/self/cgroup").read_text())
    controllers: dict[str, Place] = {}
    lacking: dict[str, str] = {}
    kinds: set[str] = set()
    for kind, root, point, options in mounts(text):
        if kind == "cgroup2":
            here = _below(root, point, paths.get("", "/"))
            offered = _words(here / "cgroup.controllers")
            if set(offered) & set(WANTED):
                kinds.add("v2")
                parent, why = _delegated(here)
                for name in set(offered) & set(WANTED):
                    if parent and name in _words(parent / "cgroup.subtree_control"):
                        controllers[name] = Place(2, parent)
                    else:
                        lacking[name] = why or f"{name} is not delegated below {here}"
            else:
                kinds.add("bare v2")
            continue
        for name in set(options.split(",")) & set(WANTED):
            kinds.add("v1")
            here = _below(root, point, paths.get(name, "/"))
            if _may_make(here):
                controllers[name] = Place(1, here)
            else:
                lacking[name] = f"{here} cannot be written by this user"
    for name in NEEDED:
        if name not in controllers:
            lacking.setdefault(name, "this host has no such controller mounted")
    version = "hybrid" if "v1" in kinds and len(kinds) > 1 else next(iter(kinds - {"bare v2"}), "none")
    places = Places(version, controllers, lacking)
    sweep(places)
    return places


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _may_make(folder: Path) -> bool:
    probe = folder / f"{owner()}-probe{next(_numbers)}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _delegated(here: Path) -> tuple[Path | None, str]:
    """Return a version 2 folder whose children have controllers, preparing it where that is allowed."""
    for folder in (here, here.parent):
        if set(NEEDED) <= set(_words(folder / "cgroup.subtree_control")) and _may_make(folder):
            return folder, ""
    if not _may_make(here):
        return None, f"{here} is not delegated to this user"
    try:
        members = [int(pid) for pid in _words(here / "cgroup.procs")]
        if members:
            if members != [os.getpid()]:
                return None, f"{here} holds other processes; start lehr in a scope of its own"
            leaf = here / f"{owner()}-main"
            leaf.mkdir(exist_ok=True)
            (leaf / "cgroup.procs").write_text(str(os.getpid()))
        wanted = [f"+{name}" for name in _words(here / "cgroup.controllers") if name in WANTED]
        (here / "cgroup.subtree_control").write_text(" ".join(wanted))
    except OSError as error:
        return None, f"{here} cannot be prepared: {error.strerror}"
    return here, ""


def sweep(places: Places) -> int:
    """Kill and remove groups whose owner no longer lives; return how many."""
    folders = {place.folder for place in places.controllers.values()}
    removed = 0
    for folder in folders:
        for orphan in folder.glob(f"lehr-{namespace()}-*"):
            if owner_ended(orphan.name):
                for group in (*(path for path in orphan.iterdir() if path.is_dir()), orphan):
                    kill_members(group)
                    removed += remove(group)
    return removed


def kill_members(folder: Path, limit_s: float = 1.0) -> None:
    """End every process of a group: at once where ``cgroup.kill`` exists, else one by one."""
    try:
        with (folder / "cgroup.kill").open("r+") as handle:
            handle.write("1")
    except OSError:
        end = time.monotonic() + limit_s
        while (members := _words(folder / "cgroup.procs")) and time.monotonic() < end:
            for pid in members:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.001)


def remove(folder: Path) -> bool:
    """Remove a group that is empty or about to be. False if something lives on in it."""
    for _ in range(50):
        try:
            folder.rmdir()
            return True
        except FileNotFoundError:
            return True
        except OSError:
            time.sleep(0.002)
    return False
