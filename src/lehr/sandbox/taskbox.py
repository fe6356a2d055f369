"""The box that a task asks for: its limits, its image, its files, and the set-up steps that it names."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

from lehr.core.errors import ConfigError
from lehr.core.task import Task
from lehr.sandbox.base import Box, Boxes, Limits, Spec
from lehr.sandbox.images import declaration
from lehr.sandbox.setups import Setup, SetupStep

BYTES_PER_INODE = 16 << 10
"""A disk that is larger than usual may hold more files than usual."""


def spec_of(task: Task) -> Spec:
    """Return the box that a task asks for. Raises as :func:`steps_of` does."""
    resources, usual = task.resources, Limits()
    longest_s = max((step.timeout_s for step in steps_of(task)), default=0.0)
    limits = Limits(
        memory_bytes=resources.memory_bytes,
        disk_bytes=resources.disk_bytes,
        inodes=max(usual.inodes, resources.disk_bytes // BYTES_PER_INODE),
        cpu=resources.cpu,
        wall_s=max(usual.wall_s, longest_s),
        cpu_s=max(usual.cpu_s, longest_s * resources.cpu),
    )
    return Spec(image=task.image, limits=limits, allow_hosts=task.allow_hosts)


def steps_of(task: Task) -> tuple[SetupStep, ...]:
    """Return the set-up steps that a task names, as its image declares them.

    Raises ``ConfigError`` that lists the known ones for a name that is not one of them.
    """
    return named_steps(task.image, task.setup) if task.setup else ()


def named_steps(image: str, names: tuple[str, ...], beside: Path | None = None) -> tuple[SetupStep, ...]:
    """Return set-up steps of an image by name. Raises ``ConfigError``, and what reading the image raises."""
    known: Mapping[str, declaration.Step] = {}
    if declaration.is_declared(image):
        known = declaration.read(image, beside).steps
    for name in names:
        if name not in known:
            raise ConfigError(
                f"the image {image!r} declares no set-up step {name!r}",
                expected=f"one of {', '.join(known)}"
                if known
                else "an image whose file has [setup.NAME] tables",
                hint=f"Add [setup.{name}] to the file that declares the image, or correct `setup` of the task.",
            )
    return tuple(SetupStep(name, known[name].run, known[name].timeout) for name in names)


async def acquire_for(boxes: Boxes, task: Task, *, timeout_s: float) -> Box:
    """Return a box in the state in which an attempt at the task begins: files written, set-up done.

    The state after the set-up is shared, never a box: the judge's is restored from what no candidate has
    touched. It counts on the quota of the task's domain. Raises the pool's errors, and ``SetupFailed``. Pair
    with ``boxes.release``.
    """
    spec, steps = spec_of(task), steps_of(task)
    files = {path: text.encode() for path, text in task.files.items()}
    if steps:
        async with boxes.prepared(spec, Setup(files, steps)) as snapshot:
            return await boxes.acquire(spec, timeout_s=timeout_s, snapshot=snapshot, domain=task.domain)
    box = await boxes.acquire(spec, timeout_s=timeout_s, domain=task.domain)
    try:
        for path, data in files.items():
            await box.write(path, data)
    except BaseException:
        await boxes.release(box)
        raise
    return box


@contextlib.asynccontextmanager
async def lease_for(boxes: Boxes, task: Task, *, timeout_s: float) -> AsyncGenerator[Box, None]:
    """Yield such a box and destroy it at the end."""
    box = await acquire_for(boxes, task, timeout_s=timeout_s)
    try:
        yield box
    finally:
        await boxes.release(box)
