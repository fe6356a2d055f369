"""Calls to the engine, each with a deadline, and what its answers mean."""

from __future__ import annotations

import contextlib
import os
import platform
import socket
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from lehr.core.errors import HostUnfit, MissingDependency
from lehr.sandbox.base import Spec
from lehr.sandbox.container.driver import Stream
from lehr.sandbox.docker import payload, profile
from lehr.sandbox.docker.attached import Attached
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.owner import owner, owner_ended

CALL_S = 20.0
CONNECTIONS = 32
LOCAL = "unix:///var/run/docker.sock"
ATTACH = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1, "logs": 0}
ENDED = ("exited", "dead")
NOT_ITS = ("/", ".", "oci:", "docker:")
"""How the names of images begin that only this machine's own backends have."""


class DockerDriver:
    """See :class:`lehr.sandbox.container.driver.Driver`.

    address: None for ``DOCKER_HOST`` or the client's current context. image: what ``host`` means.
    """

    alone = True
    renew_s = 0.0

    def __init__(self, *, address: str | None, image: str, runtime: str | None, call_s: float = CALL_S) -> None:
        self._address = address
        self._image = image
        self._runtime = runtime
        self._call_s = call_s
        self._api: Any = None
        self._looked_at: set[str] = set()
        self.own_kernel = payload.is_gvisor(runtime)
        self._labels = {payload.OWNER: owner(), payload.HOST: boot_id()}

    @property
    def where(self) -> str:
        """How the engine is addressed, for messages."""
        return self._address or os.environ.get("DOCKER_HOST") or LOCAL

    def open(self) -> None:
        """Connect, and remove boxes of owners that ended."""
        try:
            import docker
        except ImportError as error:
            raise MissingDependency(
                "the package docker is not installed, which the backend docker needs",
                hint="Install it: `pip install 'lehr[docker]'`",
            ) from error
        with self._asking("connect"):
            knock(self.where, self._call_s)
            options: dict[str, Any] = {"timeout": self._call_s, "max_pool_size": CONNECTIONS}
            if self._address:
                self._api = docker.APIClient(base_url=self._address, version="auto", **options)
            else:
                self._api = docker.from_env(version="auto", **options).api
        try:
            self._sweep()
        except BaseException:
            self.close()
            raise

    def _sweep(self) -> None:
        with self._asking("list containers"):
            found: list[dict[str, Any]] = self._api.containers(all=True, filters={"label": payload.OWNER})
        for item in found:
            labels: dict[str, str] = item.get("Labels") or {}
            if orphaned(labels, item.get("State", "")):
                with contextlib.suppress(SandboxError):
                    self.remove(item["Id"])

    def start(self, name: str, spec: Spec, argv: Sequence[str]) -> Stream:
        """Create a container, attach to it, and start it: in this order nothing that it says is missed."""
        system = self._system(spec.image)
        self._look_at(system)
        body = payload.container(
            spec, system, argv, self._labels, profile.option(platform.machine()), self._runtime
        )
        with self._asking(f"make a container of {system}", hint=fetch(system)):
            self._api.create_container_from_config(body, name)
        with self._asking(f"attach to container {name}"):
            end = self._api.attach_socket(name, ATTACH)
        holders = [end, getattr(end, "_response", None)]
        stream = Attached(getattr(end, "_sock", end), *(holder for holder in holders if holder is not None))
        try:
            with self._asking(f"start container {name}"):
                self._api.start(name)
        except BaseException:
            stream.close()
            raise
        return stream

    def _system(self, name: str) -> str:
        if name.startswith(NOT_ITS):
            raise HostUnfit(
                f"the backend docker has no image {name!r}",
                expected="host, or the name of an image that the engine has, such as python:3.12-slim",
                hint=f"Load an archive with `docker load -i`; host means {self._image}",
            )
        return self._image if name == "host" else name

    def _look_at(self, system: str) -> None:
        """Once per image: whether it is there, and holds no volume, which would be written to disk and kept."""
        if system in self._looked_at:
            return
        with self._asking(f"look at the image {system}", hint=fetch(system)):
            found: dict[str, Any] = self._api.inspect_image(system)
        config: dict[str, Any] = found.get("Config") or {}
        declared: dict[str, Any] = config.get("Volumes") or {}
        volumes = sorted(declared)
        if volumes:
            raise HostUnfit(
                f"the image {system} declares the volumes {', '.join(volumes)}, which boxes could write to",
                expected="an image without VOLUME",
                hint="Build one from it: `FROM scratch` and `COPY --from=… / /` leave the volumes behind",
            )
        self._looked_at.add(system)

    def give_up(self, name: str) -> None:
        """A start waits for nothing but calls, which end by themselves."""

    def remove(self, name: str) -> None:
        """Kill a container and remove it with what it wrote."""
        with self._asking(f"remove container {name}", gone_is_fine=True):
            self._api.remove_container(name, v=True, force=True)

    def starved(self, name: str) -> bool:
        """Whether the kernel ended process 1 of a container for want of memory."""
        with self._asking(f"inspect container {name}"):
            return bool(self._api.inspect_container(name).get("State", {}).get("OOMKilled"))

    def renew(self) -> None:
        """Owners are processes of this machine, which can be looked for."""

    def close(self) -> None:
        """Disconnect."""
        if self._api is not None:
            self._api.close()
            self._api = None

    @contextlib.contextmanager
    def _asking(self, what: str, *, hint: str = "", gone_is_fine: bool = False) -> Generator[None]:
        """Turn what the client raises into what lehr says.

        hint: where something is not there. gone_is_fine: 404 and 409 are what was wanted.
        """
        import docker.errors
        import requests.exceptions

        if self._api is None and what != "connect":
            raise SandboxError(f"cannot {what}: the backend is closed")
        engine = f"the Docker Engine at {self.where}"
        try:
            yield
        except docker.errors.APIError as error:
            status, said = error.status_code, str(error.explanation or error)[:600]
            if gone_is_fine and status in (404, 409):
                return
            kind = HostUnfit if status == 404 else SandboxError
            raise kind(
                f"{engine} cannot {what}: {said} (status {status})", hint=hint if status == 404 else ""
            ) from error
        except requests.exceptions.Timeout as error:
            raise SandboxError(
                f"{engine} did not {what} within {self._call_s:g} s", hint="Look whether it is overloaded"
            ) from error
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            raise HostUnfit(
                f"{engine} does not answer: {str(root(error))[:300]}",
                expected="a running engine that this user may use",
                hint="Start it (`systemctl start docker`), or name another by DOCKER_HOST",
            ) from error


def root(error: BaseException) -> BaseException:
    """Return what lies below an error that was wrapped several times."""
    while below := error.__cause__ or error.__context__:
        error = below
    return error


def fetch(system: str) -> str:
    """Return how to get an image that an engine does not have."""
    return f"Fetch it: `docker pull {system}`"


def knock(address: str, limit_s: float) -> None:
    """Raise the ``OSError`` of a local socket on which nothing answers; the client would leave one open."""
    if address.startswith("unix://") and (address != LOCAL or os.path.exists(LOCAL.removeprefix("unix://"))):
        with socket.socket(socket.AF_UNIX) as end:
            end.settimeout(limit_s)
            end.connect(address.removeprefix("unix://"))


def boot_id() -> str:
    """Return what tells this start of this machine from all others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def orphaned(labels: dict[str, str], state: str) -> bool:
    """Whether the owner of a container has ended.

    Of an owner of this machine the process is looked for. A box ends with its owner's connection, so that of
    owners elsewhere what has ended is nobody's.
    """
    name = labels.get(payload.OWNER, "")
    if name == owner():
        return False
    here = labels.get(payload.HOST) == boot_id()
    try:
        return state in ENDED or (here and owner_ended(name))
    except ValueError:  # no name that we gave
        return False
