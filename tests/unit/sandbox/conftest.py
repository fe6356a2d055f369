"""A small system of its own, and a folder that boxes can pass."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lehr.sandbox.image import system_python

HERE = str(Path(__file__).parent)
if HERE not in sys.path:  # the fake engines lie beside the tests
    sys.path.insert(0, HERE)

PROGRAMS = ("sh", "cat", "ls", "env", "cp", "rm", "mv", "mkdir")


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may pass."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


@pytest.fixture(scope="session")
def root() -> Iterator[Path]:
    """A small system of its own: this host's python3 and a few programs, copied, with what they load."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield make_root(Path(folder) / "root")


def make_root(folder: Path) -> Path:
    python = Path(os.path.realpath(system_python() or ""))
    for name in ("usr/bin", "usr/lib", "etc", "opt/secret"):
        (folder / name).mkdir(parents=True)
    version = python.name.removeprefix("python")
    shutil.copy2(python, folder / "usr/bin" / python.name)
    (folder / "usr/bin/python3").symlink_to(python.name)
    shutil.copytree(
        f"/usr/lib/python{version}",
        folder / f"usr/lib/python{version}",
        ignore=shutil.ignore_patterns("__pycache__", "test", "idlelib", "config-*"),
        symlinks=False,
        ignore_dangling_symlinks=True,
    )
    programs = [Path(shutil.which(name, path="/usr/bin:/bin") or "") for name in PROGRAMS]
    extensions = list((folder / f"usr/lib/python{version}/lib-dynload").glob("*.so"))
    for path in programs:
        shutil.copy2(path, folder / "usr/bin" / path.name)
    for library in {lib for path in (python, *programs, *extensions) for lib in libraries(path)}:
        place = folder / str(library).lstrip("/")
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(os.path.realpath(library), place)
    for name in ("bin", "lib", "lib64"):
        if Path("/", name).is_symlink() and not (folder / name).exists():
            (folder / name).symlink_to(f"usr/{name}")
            (folder / "usr" / name).mkdir(exist_ok=True)
    (folder / "etc/os-release").write_text("NAME=own\n")
    (folder / "opt/data").write_text("of the image\n")
    return folder


def libraries(path: Path) -> list[Path]:
    said = subprocess.run(["ldd", path], capture_output=True, text=True).stdout
    return [Path(word) for line in said.splitlines() for word in line.split() if word.startswith("/")]
