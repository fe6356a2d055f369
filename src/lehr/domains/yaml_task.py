"""Reads the task files that operators write in YAML, as they stand.

    task_id: refactor-auth-module
    sandbox:
      image: "build-env:base"
      resources: { cpu: 4, mem: 8Gi, disk: 20Gi }
    timeout: 600
    setup: [restore_dependency_cache, compile_project]
    reward:
      - run_unit_tests { weight: 1.0 }
      - run_static_checks: {weight: 0.3}

``image`` may be declared in ``images`` beside the file; ``setup`` names steps that its declaration has
(:mod:`lehr.sandbox.images.declaration`), which are run before the first turn.

Optional besides these: ``instruction``, ``domain``, ``files``, ``artifacts``, ``max_turns``, ``max_tokens``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import yaml
from pydantic import Field, ValidationError

from lehr.core.config import Config, explain
from lehr.core.errors import ConfigError, HostUnfit
from lehr.core.task import Message, Resources, RewardTerm, Task
from lehr.sandbox.egress import Rule
from lehr.sandbox.images import declaration
from lehr.sandbox.taskbox import named_steps

CLAMP = "--clamp-resources"


class SandboxSection(Config):
    """The section ``sandbox``."""

    image: str = "host"
    """What the box is made from; a relative path starts at the file."""
    allow_hosts: tuple[str, ...] = ()
    """Hosts that the task's boxes may reach, the judge's too."""
    resources: Resources = Field(default_factory=lambda: Resources.model_validate({}))
    """What it may use."""


class TaskFile(Config):
    """A task as it stands in a YAML file."""

    task_id: str
    """Name of the task."""
    instruction: str = ""
    """What the model is asked; the name of the task where it is missing."""
    domain: str = "yaml"
    """The domain that it counts for."""
    sandbox: SandboxSection = SandboxSection()
    """Its surroundings."""
    timeout: float = Field(30.0, gt=0)
    """Seconds for the whole episode."""
    setup: tuple[str, ...] = ()
    """Named steps of the image, run in order before the first turn, on the files."""
    reward: tuple[RewardTerm, ...] = Field(min_length=1)
    """Terms by which it is judged."""
    files: dict[str, str] = Field(default_factory=dict[str, str])
    """Files of the working folder."""
    artifacts: tuple[str, ...] = ()
    """What the verifier is given."""
    max_turns: int = Field(1, ge=1)
    """Completions at most."""
    max_tokens: int = Field(128, ge=1)
    """New tokens per completion."""


@dataclass(frozen=True, slots=True)
class HostSize:
    """What a machine has to give to one box."""

    cpu: float
    memory_bytes: int
    disk_bytes: int

    @classmethod
    def here(cls) -> HostSize:
        """Return the size of this machine."""
        free = shutil.disk_usage(tempfile.gettempdir()).free
        return cls(len(os.sched_getaffinity(0)), psutil.virtual_memory().total, free)


def load_task(path: Path, *, clamp: bool = False, host: HostSize | None = None) -> Task:
    """Return the task of a YAML file, to be run on ``host`` (this machine).

    Raises ``ConfigError`` for a file that cannot be read or a set-up step that its image does not declare; an
    image that is found nowhere is an error when it is used. Raises ``HostUnfit`` where the task asks for more
    than the machine has; with ``clamp``, resources are lowered to what the machine has instead.
    """
    try:
        raw = yaml.safe_load(path.read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"no such file: {path}", hint="Check the path.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", expected="valid YAML") from error
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{path} holds no task", expected="keys such as task_id and reward")
    try:
        file = TaskFile.model_validate(dict(cast("Mapping[str, Any]", raw)))
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(TaskFile, error, raw)}") from error
    for text in file.sandbox.allow_hosts:
        Rule.parse(text)
    resources = _fit(file, host or HostSize.here(), clamp)
    image = declaration.absolute(file.sandbox.image, path.resolve().parent)
    if file.setup and (declaration.locate(image) or not declaration.is_declared(image)):
        named_steps(image, file.setup)
    return Task(
        id=file.task_id,
        domain=file.domain,
        messages=(Message(role="user", content=file.instruction or file.task_id),),
        files=file.files,
        image=image,
        allow_hosts=file.sandbox.allow_hosts,
        setup=file.setup,
        artifacts=file.artifacts,
        reward=file.reward,
        resources=resources,
        timeout_s=file.timeout,
        max_turns=file.max_turns,
        max_tokens=file.max_tokens,
    )


def _fit(file: TaskFile, host: HostSize, clamp: bool) -> Resources:
    asked = file.sandbox.resources
    lines: list[str] = []
    if asked.cpu > host.cpu:
        lines.append(f"cpu: {asked.cpu:g} asked, {host.cpu:g} here")
    if asked.memory_bytes > host.memory_bytes:
        lines.append(f"mem: {_size(asked.memory_bytes)} asked, {_size(host.memory_bytes)} here")
    if asked.disk_bytes > host.disk_bytes:
        lines.append(f"disk: {_size(asked.disk_bytes)} asked, {_size(host.disk_bytes)} here")
    if lines and not clamp:
        raise HostUnfit(
            f"this machine is too small for {file.task_id}: {'; '.join(lines)}",
            hint=f"Add {CLAMP} to run it with what is here, or use a larger machine.",
        )
    return asked.model_copy(
        update={
            "cpu": min(asked.cpu, host.cpu),
            "memory_bytes": min(asked.memory_bytes, host.memory_bytes),
            "disk_bytes": min(asked.disk_bytes, host.disk_bytes),
        }
    )


def _size(count: int) -> str:
    for unit, scale in (("Gi", 1 << 30), ("Mi", 1 << 20), ("Ki", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.4g}{unit}"
    return str(count)
