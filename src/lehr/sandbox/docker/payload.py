"""What the engine is asked to make: one container per box, as little as a program can live in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lehr.sandbox import image
from lehr.sandbox.base import Limits, Spec
from lehr.sandbox.container.driver import room

USER = 1000
OWNER, HOST = "lehr.owner", "lehr.host"
"""Labels: the process that a box belongs to, and the start of the machine on which that lives."""


def container(
    spec: Spec,
    system: str,
    argv: Sequence[str],
    labels: Mapping[str, str],
    filter_option: str,
    runtime: str | None,
) -> dict[str, Any]:
    """Return the body of ``POST /containers/create``.

    system: the engine's name of the image. filter_option: see :mod:`profile`. runtime: None for the engine's.
    """
    limits = spec.limits
    memory, pids = room(limits, own_kernel=is_gvisor(runtime))
    held: dict[str, Any] = {
        "NetworkMode": "none",
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges:true", filter_option],
        "Privileged": False,
        "ReadonlyRootfs": True,
        "Tmpfs": {"/work": disk(limits, "0755"), "/tmp": disk(limits, "1777")},
        "ShmSize": limits.disk_bytes,
        "Memory": memory,
        "MemorySwap": memory,
        "PidsLimit": pids,
        "NanoCpus": int(limits.cpu * 1e9),
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "Init": False,
        "Ulimits": [{"Name": "core", "Soft": 1, "Hard": 1}],
        "LogConfig": {"Type": "none", "Config": {}},
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
    }
    if runtime:
        held["Runtime"] = runtime
    return {
        "Image": system,
        "Entrypoint": list(argv),
        "Cmd": [],
        "User": f"{USER}:{USER}",
        "Hostname": "box",
        "WorkingDir": "/",
        "Env": [f"{name}={value}" for name, value in image.ENVIRONMENT.items()],
        "Tty": False,
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "NetworkDisabled": True,
        "Healthcheck": {"Test": ["NONE"]},
        "Labels": dict(labels),
        "HostConfig": held,
    }


def disk(limits: Limits, mode: str) -> str:
    """Return the options of one memory file system of the box's user."""
    size = f"size={limits.disk_bytes},nr_inodes={limits.inodes}"
    return f"rw,exec,nosuid,nodev,{size},mode={mode},uid={USER},gid={USER}"


def is_gvisor(runtime: str | None) -> bool:
    """Whether boxes of a runtime have gVisor's kernel, by its name."""
    return runtime is not None and ("runsc" in runtime or "gvisor" in runtime)
