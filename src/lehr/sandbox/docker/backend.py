"""The backend ``docker``: each box is a container of an engine, by default the local one."""

from __future__ import annotations

import os

from lehr.sandbox.base import BACKENDS
from lehr.sandbox.container.backend import ContainerBackend
from lehr.sandbox.docker.driver import CALL_S, DockerDriver

IMAGE = "python:3.12-slim"
START_S = 60.0


class DockerBackend(ContainerBackend):
    """Makes boxes through a Docker Engine. Life cycle: see :class:`ContainerBackend`.

    address: of the engine, such as ``unix:///run/docker.sock``; by default ``DOCKER_HOST``, or what the
    client's current context says. image: what ``host`` means (``LEHR_DOCKER_IMAGE``). runtime: such as
    ``runsc``, by default the engine's (``LEHR_DOCKER_RUNTIME``). call_s: seconds that one call may take.
    """

    def __init__(
        self,
        *,
        address: str | None = None,
        image: str | None = None,
        runtime: str | None = None,
        call_s: float = CALL_S,
    ) -> None:
        driver = DockerDriver(
            address=address,
            image=image or os.environ.get("LEHR_DOCKER_IMAGE") or IMAGE,
            runtime=runtime or os.environ.get("LEHR_DOCKER_RUNTIME") or None,
            call_s=call_s,
        )
        super().__init__("docker", driver, start_s=START_S)


if "docker" not in list(BACKENDS):
    BACKENDS.register("docker", DockerBackend)
