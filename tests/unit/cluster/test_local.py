import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from toy_role import Pair, ToyTooLarge

from lehr.cluster.base import Event, Role
from lehr.cluster.local import LocalCluster, LocalHandle
from lehr.core.errors import ConfigError, DeadlineExceeded, LehrError, RoleLost
from lehr.wire.codec import CodecError
from lehr.wire.failures import BadRequest, RemoteError


def with_role(
    tmp_path: Path, body: Callable[[LocalCluster, LocalHandle], Awaitable[None]], **config: object
) -> None:
    async def main() -> None:
        cluster = LocalCluster(tmp_path)
        try:
            handle = await cluster.start(toy(tmp_path, **config), timeout_s=30)
            await body(cluster, handle)
        finally:
            await cluster.close()

    asyncio.run(main())


def toy(tmp_path: Path, **config: object) -> Role:
    return Role("toy", "toy_role:make", {"marker": str(tmp_path / "marker"), **config})


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def test_a_call_takes_arrays_there_and_back(tmp_path: Path) -> None:
    async def body(cluster: LocalCluster, handle: LocalHandle) -> None:
        values = np.arange(8 << 20, dtype=np.float32)
        answer = await handle.call("double", Pair("ab", values), returns=Pair)
        assert answer.name == "abab"
        np.testing.assert_array_equal(answer.values, values * 2)

    with_role(tmp_path, body)
    assert (tmp_path / "marker.closed").exists(), "the service is closed politely"


def test_calls_run_side_by_side(tmp_path: Path) -> None:
    async def body(cluster: LocalCluster, handle: LocalHandle) -> None:
        begun = time.monotonic()
        held = await asyncio.gather(*(handle.call("hold", 0.3, returns=str) for _ in range(20)))
        assert held == ["held"] * 20
        assert time.monotonic() - begun < 3.0

    with_role(tmp_path, body)


def test_failures_arrive_as_the_error_they_name(tmp_path: Path) -> None:
    async def body(cluster: LocalCluster, handle: LocalHandle) -> None:
        with pytest.raises(ToyTooLarge, match=r"31 tokens do not fit. Expected at most 16"):
            await handle.call("fail", "large")
        with pytest.raises(RemoteError, match=r"by zero") as caught:
            await handle.call("fail", "other")
        assert caught.value.code == "ZeroDivisionError"
        with pytest.raises(BadRequest, match=r"did you|Expected 'toy.count'"):
            await handle.call("cuont")
        with pytest.raises(BadRequest, match=r"body of toy.double"):
            await handle.call("double", {"name": 3})
        with pytest.raises(BadRequest, match=r"takes no argument"):
            await handle.call("count", 3)
        with pytest.raises(CodecError, match=r"PosixPath"):
            await handle.call("unsendable")
        assert await handle.call("count", returns=int) == 1

    with_role(tmp_path, body)


def test_threads_and_cores_are_those_of_the_role(tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))

    async def main() -> None:
        cluster = LocalCluster(tmp_path)
        try:
            role = Role("toy", "toy_role:make", {"marker": str(tmp_path / "m")}, cores=(core,), threads=3)
            handle = await cluster.start(role, timeout_s=30)
            assert await handle.call("threads") == {"omp": "3", "cores": [core]}
        finally:
            await cluster.close()

    asyncio.run(main())


def test_a_killed_role_fails_its_calls_at_once(tmp_path: Path) -> None:
    async def body(cluster: LocalCluster, handle: LocalHandle) -> None:
        waiting = asyncio.create_task(handle.call("hold", 60.0, timeout_s=120))
        await asyncio.sleep(0.2)
        begun = time.monotonic()
        os.kill(handle.pid, signal.SIGKILL)
        with pytest.raises(RoleLost, match=r"SIGKILL"):
            await waiting
        assert time.monotonic() - begun < 2.0
        with pytest.raises(RoleLost):
            await handle.call("count")
        assert not handle.alive
        seen: list[Event] = []
        async for event in cluster.watch():
            seen.append(event)
            if event.kind == "lost":
                break
        assert [(e.role, e.kind, e.incarnation) for e in seen] == [("toy", "ready", 1), ("toy", "lost", 1)]
        again = await cluster.start(toy(tmp_path), timeout_s=30)
        assert again.incarnation == 2
        assert await again.call("count", returns=int) == 1

    with_role(tmp_path, body)


def test_a_watcher_ends_with_the_cluster(tmp_path: Path) -> None:
    async def body(cluster: LocalCluster, handle: LocalHandle) -> None:
        async def watch() -> list[str]:
            return [event.kind async for event in cluster.watch()]

        watching = asyncio.create_task(watch())
        await asyncio.sleep(0)
        await cluster.close()
        assert await asyncio.wait_for(watching, 5) == ["ready"]
        with pytest.raises(ConfigError):
            await cluster.start(toy(tmp_path))

    with_role(tmp_path, body)


def test_a_cancelled_call_cancels_its_handler(tmp_path: Path) -> None:
    async def body(cluster: LocalCluster, handle: LocalHandle) -> None:
        waiting = asyncio.create_task(handle.call("hold", 60.0))
        await asyncio.sleep(0.2)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.to_thread(wait_until, (tmp_path / "marker").exists)

    with_role(tmp_path, body)


def test_a_call_ends_at_its_deadline_on_both_sides(tmp_path: Path) -> None:
    async def body(cluster: LocalCluster, handle: LocalHandle) -> None:
        with pytest.raises(DeadlineExceeded, match=r"toy.hold"):
            await handle.call("hold", 60.0, timeout_s=0.3)
        await asyncio.to_thread(wait_until, (tmp_path / "marker").exists)

    with_role(tmp_path, body)


def test_a_role_that_cannot_be_built_says_why(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = LocalCluster(tmp_path)
        try:
            with pytest.raises(ConfigError, match=r"/nowhere does not exist"):
                await cluster.start(toy(tmp_path, refuse=True), timeout_s=30)
            with pytest.raises(RoleLost, match=r"(?s)status 3.*last words"):
                await cluster.start(toy(tmp_path, exit=True), timeout_s=30)
            with pytest.raises(LehrError, match=r"no_such_module"):
                await cluster.start(Role("odd", "no_such_module:make"), timeout_s=30)
            with pytest.raises(DeadlineExceeded, match=r"not ready within"):
                await cluster.start(toy(tmp_path, slow=30), timeout_s=1.0)
            await cluster.start(toy(tmp_path), timeout_s=30)
            with pytest.raises(ConfigError, match=r"running already"):
                await cluster.start(toy(tmp_path), timeout_s=30)
        finally:
            await cluster.close()

    asyncio.run(main())


def test_close_is_bounded_when_a_role_does_not_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lehr.cluster.local.POLITE_S", 0.5)

    async def main() -> None:
        cluster = LocalCluster(tmp_path)
        handle = await cluster.start(toy(tmp_path), timeout_s=30)
        waiting = asyncio.create_task(handle.call("block", 60.0))
        await asyncio.sleep(0.3)
        begun = time.monotonic()
        await cluster.close()
        assert time.monotonic() - begun < 4.0
        with pytest.raises(RoleLost):
            await waiting
        assert not psutil.pid_exists(handle.pid)

    asyncio.run(main())


def test_close_does_not_wait_for_a_role_that_is_being_built(tmp_path: Path) -> None:
    async def main() -> None:
        cluster = LocalCluster(tmp_path)
        starting = asyncio.create_task(cluster.start(toy(tmp_path, slow=60), timeout_s=60))
        await asyncio.sleep(1.0)
        begun = time.monotonic()
        await cluster.close()
        with pytest.raises(RoleLost):
            await starting
        assert time.monotonic() - begun < 4.0

    asyncio.run(main())


def test_nothing_survives_the_death_of_the_orchestrator(tmp_path: Path) -> None:
    program = f"""
import asyncio, os
from pathlib import Path
from lehr.cluster.base import Role
from lehr.cluster.local import LocalCluster
async def main():
    cluster = LocalCluster(Path({str(tmp_path)!r}))
    role = Role("toy", "toy_role:make", {{"marker": {str(tmp_path / "marker")!r}}})
    handle = await cluster.start(role, timeout_s=30)
    print(handle.pid, flush=True)
    await handle.call("block", 300.0, timeout_s=600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as orchestrator:
        assert orchestrator.stdout is not None
        pid = int(orchestrator.stdout.readline())
        assert psutil.pid_exists(pid)
        orchestrator.kill()
    wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")


def test_what_a_killed_role_had_started_is_killed_too(tmp_path: Path) -> None:
    async def body(cluster: LocalCluster, handle: LocalHandle) -> None:
        child = int((tmp_path / "marker.child").read_text())
        assert psutil.pid_exists(child)
        os.kill(handle.pid, signal.SIGKILL)
        await asyncio.to_thread(
            wait_until, lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == "zombie"
        )

    with_role(tmp_path, body, spawn=True)
