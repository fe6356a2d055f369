"""The ``host`` image as an OCI bundle: a root folder of links and small files, and a ``config.json``.

System folders are read-only bind mounts. ``/work``, ``/tmp`` and ``/dev/shm`` are laid out from within, on one
size-limited disk, so that one bundle serves boxes of every spec.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lehr.sandbox import image

RIGHTS = ("CAP_SYS_ADMIN", "CAP_CHOWN", "CAP_KILL", "CAP_SETGID", "CAP_SETUID", "CAP_SETPCAP")
"""Of the runner, over gVisor's kernel alone, until the disk is laid out. Programs have none."""
FOLDERS = ("dev", "etc", "proc", "run", "sys", "tmp", "usr", "var", "work")
NAMESPACES = ("pid", "mount", "ipc", "uts", "network")
READ_ONLY = ("rbind", "ro", "nosuid", "nodev")


def config(argv: Sequence[str]) -> dict[str, Any]:
    """Return the ``config.json`` of a container whose process 1 is ``argv``."""
    rights = list(RIGHTS)
    return {
        "ociVersion": "1.0.0",
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0, "additionalGids": []},
            "args": list(argv),
            "env": [f"{name}={value}" for name, value in image.ENVIRONMENT.items()],
            "cwd": "/",
            "capabilities": {kind: rights for kind in ("bounding", "effective", "inheritable", "permitted")},
            "noNewPrivileges": True,
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 4096, "hard": 4096}],
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "box",
        "mounts": mounts(),
        "linux": {"namespaces": [{"type": kind} for kind in NAMESPACES]},
    }


def mounts() -> list[dict[str, Any]]:
    """Return what lies on the root folder. An empty folder covers ``/sys``, which gVisor mounts unasked."""
    out: list[dict[str, Any]] = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        _empty(Path("/sys")),
    ]
    folders = [Path("/usr")]
    folders += [
        path for name in image.ROOT_LINKS if (path := Path("/", name)).is_dir() and not path.is_symlink()
    ]
    out += [
        {"destination": str(path), "type": "bind", "source": str(path), "options": list(READ_ONLY)}
        for path in folders
    ]
    return [*out, *map(_empty, image.covered())]


def _empty(path: Path) -> dict[str, Any]:
    options = ["ro", "nosuid", "nodev", "noexec", "size=4096", "mode=0755"]
    return {"destination": str(path), "type": "tmpfs", "source": "tmpfs", "options": options}


def write(folder: Path, argv: Sequence[str]) -> None:
    """Make the bundle in a folder that exists."""
    root = folder / "rootfs"
    root.mkdir()
    root.chmod(0o755)
    for name in FOLDERS:
        (root / name).mkdir()
        (root / name).chmod(0o755)
    (root / "var" / "tmp").symlink_to("../tmp")
    for name in image.ROOT_LINKS:
        path = Path("/", name)
        if path.is_symlink():
            (root / name).symlink_to(os.readlink(path))
        elif path.is_dir():
            (root / name).mkdir(mode=0o755)
    for path in image.etc():
        if path.is_dir():
            shutil.copytree(path, root / path.relative_to("/"), symlinks=True)
        else:
            shutil.copy(path, root / path.relative_to("/"))
    for name, data in image.ETC_FILES:
        (root / name.lstrip("/")).write_bytes(data)
    (folder / "config.json").write_text(json.dumps(config(argv), indent=1))
