"""The state that set-up steps leave behind: made once, kept as a snapshot, restored for whoever needs it.

A state is named by what it was made from: the image, the limits, the files, and each step after the ones before
it. Two set-ups that begin alike share what they have in common.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

from lehr.sandbox import roots
from lehr.sandbox.base import Box, Boxes, ExecResult, Snapshot, Spec
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.images.halt import in_thread, shared
from lehr.sandbox.lease import on_behalf_of

MOST = 64
MOST_BYTES = 2 << 30
LEASE_S = 300.0
"""Longest wait for a box in which a step is to run."""
TOLD_LINES, TOLD_CHARACTERS = 12, 2000


@dataclass(frozen=True, slots=True)
class SetupStep:
    """Commands that are run one after the other in the working folder. timeout_s: for all of them together."""

    name: str
    run: tuple[str, ...]
    timeout_s: float

    def __post_init__(self) -> None:
        """Raise ``TypeError`` for one command that is not in a tuple: its letters would be commands."""
        if isinstance(self.run, str):
            raise TypeError(f"run is the string {self.run!r}; expected a tuple such as ({self.run!r},)")


@dataclass(frozen=True, slots=True)
class Setup:
    """What is done to a box before it is used: ``files`` are written, then the steps are run in order."""

    files: Mapping[str, bytes]
    steps: tuple[SetupStep, ...]


class SetupFailed(SandboxError):
    """A set-up step did not end well: a fault of the task's surroundings, never of who was to use them."""

    code = "setup"


@dataclass(slots=True)
class _State:
    """A kept state. users: how many are about to restore it; it is not discarded meanwhile."""

    snapshot: Snapshot
    size_bytes: int
    users: int

    @property
    def lost(self) -> bool:
        return bool(getattr(self.snapshot, "lost", False))


class _Flight:
    """A state that is being made. waiting: how many wait for ``landed``, each of whom will be a user of it."""

    def __init__(self) -> None:
        self.waiting = 0
        self.landed: asyncio.Future[_State] = asyncio.get_running_loop().create_future()

    def fail(self, error: BaseException) -> None:
        """Tell everybody who waits; there may be nobody any more."""
        self.landed.set_exception(error)
        self.landed.exception()


@dataclass(frozen=True, slots=True)
class _Plan:
    """A set-up with the names of the states after each of its steps."""

    spec: Spec
    setup: Setup
    keys: tuple[str, ...]


@dataclass(slots=True)
class Counts:
    """made: steps that were run. reused: times that a state was there, or being made for another. bytes: what
    is kept.
    """

    made: int = 0
    reused: int = 0
    discarded: int = 0
    bytes: int = 0


class SetUps:
    """Owns kept states. Life cycle: made anywhere, used in a running loop, ended by :meth:`close`.

    boxes: where steps run; their snapshots may have ``size_bytes`` and ``lost``. most, most_bytes: what is kept
    at most; those unused longest go first, but never the last one that was used, however large it is, nor one
    that somebody is restoring. With bwrap the bytes are memory.
    """

    def __init__(self, boxes: Boxes, *, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._boxes = boxes
        self._most = most
        self._most_bytes = most_bytes
        self._states: OrderedDict[str, _State] = OrderedDict()
        self._flights: dict[str, _Flight] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._images: dict[str, asyncio.Task[str]] = {}
        self._closed = False
        self.counts = Counts()

    def ready(self, spec: Spec, setup: Setup) -> AbstractAsyncContextManager[Snapshot]:
        """Yield the state after the set-up, to be restored inside. It is made unless it is kept; who asks while
        it is being made waits for the same. A cancelled asker does not stop what others wait for.

        Raises ``SetupFailed`` that names the step, its verdict, its exit code and its last lines.
        """
        return self._ready(spec, setup)

    @contextlib.asynccontextmanager
    async def _ready(self, spec: Spec, setup: Setup) -> AsyncGenerator[Snapshot, None]:
        if not setup.steps:
            raise SandboxError("a set-up without a step leaves no state", expected="at least one step")
        spec = replace(spec, allow_hosts=())
        plan = _Plan(spec, setup, _keys(await self._image(spec.image), spec, setup))
        state = await self._hold(plan, len(plan.keys) - 1)
        try:
            yield state.snapshot
        finally:
            state.users -= 1
            await self._shrink()

    async def _image(self, name: str) -> str:
        """Return what names the content of an image, found once while it is in use here."""
        self._open()
        finding = self._images.get(name)
        if finding is None:
            finding = asyncio.get_running_loop().create_task(in_thread(roots.identity, name))
            self._images[name] = finding
            finding.add_done_callback(lambda done: self._keep_image(name, done))
        return await shared(finding, f"the search for the image {name}")

    def _keep_image(self, name: str, done: asyncio.Task[str]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._images.pop(name, None)

    def _open(self) -> None:
        if self._closed:
            raise SandboxError("set-ups are closed", expected="a pool that is open")

    async def _hold(self, plan: _Plan, number: int) -> _State:
        """Return the state after a step, with its count of users raised."""
        self._open()
        key = plan.keys[number]
        state = self._states.get(key)
        if state is not None and not state.lost:
            self._states.move_to_end(key)
            self.counts.reused += 1
            state.users += 1
            return state
        flight = self._flights.get(key)
        if flight is None:
            self._flights[key] = flight = _Flight()
            task = asyncio.get_running_loop().create_task(self._fly(flight, plan, number))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self.counts.reused += 1
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.landed)
        except asyncio.CancelledError:
            if flight.landed.done() and flight.landed.exception() is None:
                flight.landed.result().users -= 1
            else:
                flight.waiting -= 1
            raise

    async def _fly(self, flight: _Flight, plan: _Plan, number: int) -> None:
        """Make one state and keep it. The boundary at which a failure becomes that of all who wait."""
        key = plan.keys[number]
        try:
            with on_behalf_of(phase="setup"):
                snapshot = await self._make(plan, number)
        except asyncio.CancelledError:
            flight.fail(SandboxError("the pool was closed while a set-up ran"))
            raise
        except Exception as error:
            flight.fail(error)
            return
        finally:
            self._flights.pop(key, None)
        state = _State(snapshot, int(getattr(snapshot, "size_bytes", 0)), flight.waiting)
        old = self._states.pop(key, None)
        self._states[key] = state
        self.counts.made += 1
        self.counts.bytes += state.size_bytes
        flight.landed.set_result(state)
        if old is not None:
            await self._discard(old)
        await self._shrink()

    async def _make(self, plan: _Plan, number: int) -> Snapshot:
        """Run a step on the state before it, in a box of its own, and record what is on the disk then."""
        step = plan.setup.steps[number]
        if number == 0:
            box = await self._boxes.acquire(plan.spec, timeout_s=LEASE_S)
        else:
            below = await self._hold(plan, number - 1)
            try:
                box = await self._boxes.acquire(plan.spec, timeout_s=LEASE_S, snapshot=below.snapshot)
            finally:
                below.users -= 1
        try:
            if number == 0:
                for path, data in plan.setup.files.items():
                    await box.write(path, data)
            await _run(box, step)
            return await box.snapshot()
        finally:
            await self._boxes.release(box)

    async def _shrink(self) -> None:
        """Discard what is beyond the bounds, unused longest first."""
        while len(self._states) > self._most or self.counts.bytes > self._most_bytes:
            old = next((key for key in list(self._states)[:-1] if not self._states[key].users), None)
            if old is None:
                return
            await self._discard(self._states.pop(old))

    async def _discard(self, state: _State) -> None:
        self.counts.discarded += 1
        self.counts.bytes -= state.size_bytes
        await state.snapshot.discard()

    async def close(self) -> None:
        """Stop what runs, a build of an image too, and discard every state."""
        self._closed = True
        tasks: list[asyncio.Task[Any]] = [*self._tasks, *self._images.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._states:
            _, state = self._states.popitem()
            await self._discard(state)


def _keys(image: str, spec: Spec, setup: Setup) -> tuple[str, ...]:
    """Return the name of the state after each step: a chain, each link over the one before."""
    files = {path: hashlib.sha256(data).hexdigest() for path, data in setup.files.items()}
    text = json.dumps([image, asdict(spec), files], sort_keys=True)
    keys: list[str] = []
    for step in setup.steps:
        link = json.dumps([keys[-1] if keys else text, step.run, step.timeout_s])
        keys.append(hashlib.sha256(link.encode()).hexdigest())
    return tuple(keys)


async def _run(box: Box, step: SetupStep) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + step.timeout_s
    for command in step.run:
        result = await box.exec(["sh", "-ec", command], timeout_s=max(0.01, until - loop.time()))
        if result.verdict != "ok":
            raise SetupFailed(
                f"the set-up step {step.name!r} failed at {command!r}: {_ended(result)}",
                expected=f"exit code 0 within {step.timeout_s:g} s",
                hint=f"It last said: {_last(result)}",
            )


def _ended(result: ExecResult) -> str:
    code = "no exit code" if result.exit_code is None else f"exit code {result.exit_code}"
    return f"verdict {result.verdict}, {code}" + (f", {result.detail}" if result.detail else "")


def _last(result: ExecResult) -> str:
    text = (result.stdout + result.stderr).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()][-TOLD_LINES:]
    return " | ".join(lines)[-TOLD_CHARACTERS:] or "nothing"
