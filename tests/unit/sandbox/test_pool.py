"""The pool, on boxes that are made instantly: order, deadlines, cancellation, records."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest

from lehr.core.errors import DeadlineExceeded, HostUnfit
from lehr.core.protocols import ListRecorder
from lehr.sandbox.base import Box, ExecResult, ExecUsage, Limits, Opening, Shell, Snapshot, Spec
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.lease import LeasedBox
from lehr.sandbox.pool import Pool

SPEC = Spec()
OTHER = Spec(limits=Limits(pids=7))


class FakeShell:
    async def send(self, data: bytes) -> None:
        return None

    async def run(self, command: str, *, timeout_s: float = 10.0) -> ExecResult:
        return ExecResult("exit", 3, command.encode(), b"")

    async def close(self) -> None:
        return None


class FakeBox:
    """A box that answers at once and counts its destructions."""

    def __init__(self, backend: FakeBackend, spec: Spec, number: int) -> None:
        self.id = f"fake-{number}"
        self.spec = spec
        self.backend = backend
        self.broken = False
        self.destroyed = 0

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str = ".",
        timeout_s: float | None = None,
    ) -> ExecResult:
        return ExecResult(
            "ok", 0, b"out", b"", usage=ExecUsage(wall_s=0.5, cpu_s=0.25, peak_bytes=7, peak_pids=2)
        )

    async def write(self, path: str, data: bytes) -> None:
        return None

    async def read(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes:
        return b""

    async def tree(
        self, path: str = ".", *, limit_files: int = 4096, limit_bytes: int = 8 << 20
    ) -> Mapping[str, bytes | None]:
        return {}

    def shell(self, *, terminal: bool = False) -> Opening[Shell]:
        async def start() -> Shell:
            return FakeShell()

        return Opening(start())

    async def destroy(self) -> None:
        await asyncio.sleep(self.backend.destroy_s)
        self.destroyed += 1
        self.backend.alive.discard(self)


class FakeBackend:
    name = "fake"

    def __init__(
        self, *, create_s: float = 0.0, destroy_s: float = 0.0, error: Exception | None = None
    ) -> None:
        self.create_s, self.destroy_s, self.error = create_s, destroy_s, error
        self.alive: set[FakeBox] = set()
        self.made = 0

    async def create(self, spec: Spec, snapshot: Snapshot | None = None, *, ahead: bool = False) -> Box:
        await asyncio.sleep(self.create_s)
        if self.error:
            raise self.error
        self.made += 1
        box = FakeBox(self, spec, self.made)
        self.alive.add(box)
        return box

    async def close(self) -> None:
        return None


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_s37_waiters_are_served_in_order_and_told_why_they_were_not() -> None:
    async def run() -> None:
        pool = Pool(FakeBackend(), warm=0, limit=1)
        served: list[int] = []

        async def ask(number: int) -> None:
            async with pool.lease(SPEC):
                served.append(number)
                await asyncio.sleep(0)

        first = await pool.acquire(SPEC)
        waiting = [asyncio.create_task(ask(number)) for number in range(5)]
        await settle()
        with pytest.raises(DeadlineExceeded, match=r"all 1 are leased and 5 others wait"):
            await pool.acquire(SPEC, timeout_s=0.01)
        assert served == []
        await pool.release(first)
        await asyncio.gather(*waiting)
        assert served == [0, 1, 2, 3, 4]
        await pool.close()

    asyncio.run(run())


def test_warm_boxes_are_refilled_and_never_given_twice() -> None:
    async def run() -> None:
        backend = FakeBackend()
        pool = Pool(backend, warm=2, limit=8)
        recorder = ListRecorder()
        pool = Pool(backend, warm=2, limit=8, recorder=recorder)
        seen: list[str] = []
        for _ in range(6):
            async with pool.lease(SPEC) as box:
                seen.append(box.id)
                await box.exec(["true"])
            await settle()
            assert pool.warm_boxes(SPEC) == 2
        assert len(set(seen)) == 6
        assert [fields["obtained"] for _, fields in recorder.events] == ["cold"] + ["warm"] * 5
        async with pool.lease(OTHER) as box:
            await box.exec(["true"])
        assert recorder.events[-1][1]["obtained"] == "cold"
        await pool.close()
        assert backend.alive == set()

    asyncio.run(run())


def test_cancelled_callers_leak_nothing() -> None:
    async def run() -> None:
        backend = FakeBackend(create_s=0.005, destroy_s=0.002)
        pool = Pool(backend, warm=0, limit=2)

        async def use() -> None:
            async with pool.lease(SPEC, timeout_s=5):
                await asyncio.sleep(0.01)

        for delay in range(12):
            tasks = [asyncio.create_task(use()) for _ in range(4)]
            await asyncio.sleep(delay * 0.002)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        async with pool.lease(SPEC, timeout_s=1), pool.lease(SPEC, timeout_s=1):
            assert len(backend.alive) == 2
        await pool.close()
        assert backend.alive == set()

    asyncio.run(run())


def test_s39_release_returns_within_its_bound_though_the_box_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lehr.sandbox.pool.RELEASE_S", 0.05)

    async def run() -> None:
        pool = Pool(FakeBackend(destroy_s=3600), warm=0, limit=1)
        box = await pool.acquire(SPEC)
        await asyncio.wait_for(pool.release(box), 2)
        await asyncio.wait_for(pool.acquire(SPEC, timeout_s=1), 2)

    asyncio.run(run())


def test_release_is_idempotent_and_ends_the_lease() -> None:
    async def run() -> None:
        backend = FakeBackend()
        pool = Pool(backend, warm=0, limit=1)
        box = await pool.acquire(SPEC)
        await pool.release(box)
        await pool.release(box)
        with pytest.raises(SandboxError, match="was released"):
            await box.exec(["true"])
        one = await pool.acquire(SPEC, timeout_s=0.1)
        with pytest.raises(DeadlineExceeded):
            await pool.acquire(SPEC, timeout_s=0.01)
        await pool.release(one)
        await pool.close()

    asyncio.run(run())


def test_an_unfit_host_is_told_to_every_caller_and_takes_no_place() -> None:
    async def run() -> None:
        pool = Pool(FakeBackend(error=HostUnfit("no namespaces")), warm=2, limit=1)
        for _ in range(3):
            with pytest.raises(HostUnfit, match="no namespaces"):
                await pool.acquire(SPEC, timeout_s=0.5)
        await pool.close()

    asyncio.run(run())


def test_slow_creation_ends_at_the_deadline() -> None:
    async def run() -> None:
        pool = Pool(FakeBackend(create_s=60), warm=0, limit=1)
        with pytest.raises(DeadlineExceeded, match="not ready"):
            await pool.acquire(SPEC, timeout_s=0.02)
        await pool.close()

    asyncio.run(run())


def test_closing_wakes_whoever_waits() -> None:
    async def run() -> None:
        pool = Pool(FakeBackend(), warm=0, limit=1)
        await pool.acquire(SPEC)
        waiting = asyncio.create_task(pool.acquire(SPEC))
        await settle()
        await pool.close()
        with pytest.raises(SandboxError, match="closed"):
            await waiting
        with pytest.raises(SandboxError, match="closed"):
            await pool.acquire(SPEC)

    asyncio.run(run())


def test_every_call_is_recorded() -> None:
    async def run() -> None:
        recorder = ListRecorder()
        pool = Pool(FakeBackend(), warm=0, recorder=recorder)
        async with pool.lease(SPEC) as box:
            await box.exec(["python3", "x.py"])
            await (await box.shell()).run("false")
        assert [kind for kind, _ in recorder.events] == ["sandbox.exec"] * 2
        first = recorder.events[0][1]
        assert first["program"] == "python3 x.py" and first["verdict"] == "ok" and first["obtained"] == "cold"
        assert (first["wall_s"], first["cpu_s"], first["peak_bytes"], first["peak_pids"]) == (0.5, 0.25, 7, 2)
        assert first["queue_s"] >= 0
        assert recorder.events[1][1]["exit_code"] == 3
        await pool.close()

    asyncio.run(run())


def test_specs_out_of_use_keep_no_warm_boxes() -> None:
    async def run() -> None:
        backend = FakeBackend()
        pool = Pool(backend, warm=1)
        for pids in range(1, 15):
            async with pool.lease(Spec(limits=Limits(pids=pids))):
                pass
            await settle()
        assert len(backend.alive) == 8
        await pool.close()
        assert backend.alive == set()

    asyncio.run(run())


def test_a_lease_has_the_name_of_its_box() -> None:
    async def run() -> None:
        pool = Pool(FakeBackend(), warm=0)
        async with pool.lease(SPEC) as box:
            assert box.id == "fake-1" and isinstance(box, LeasedBox)
        await pool.close()

    asyncio.run(run())


def test_a_domain_holds_no_more_than_its_quota_and_does_not_hold_up_others() -> None:
    async def run() -> None:
        pool = Pool(FakeBackend(), warm=0, limit=3, quotas={"slow": 1})
        first = await pool.acquire(SPEC, domain="slow")
        waiting = asyncio.create_task(pool.acquire(SPEC, domain="slow"))
        await settle()
        other = await pool.acquire(SPEC, domain="quick", timeout_s=0.1)
        with pytest.raises(DeadlineExceeded, match=r"slow holds its 1 of 3 and 1 others wait"):
            await pool.acquire(SPEC, domain="slow", timeout_s=0.01)
        assert not waiting.done()
        await pool.release(first)
        await asyncio.wait_for(waiting, 1)
        assert pool.leased == 2 and pool.waiting == 0
        for box in (other, await waiting):
            await pool.release(box)
        await pool.close()

    asyncio.run(run())


def test_a_waiter_over_its_quota_lets_those_behind_it_pass() -> None:
    async def run() -> None:
        pool = Pool(FakeBackend(), warm=0, limit=2, quotas={"a": 1})
        held = [await pool.acquire(SPEC, domain="a"), await pool.acquire(SPEC, domain="b")]
        a = asyncio.create_task(pool.acquire(SPEC, domain="a"))
        await settle()
        b = asyncio.create_task(pool.acquire(SPEC, domain="b"))
        await settle()
        await pool.release(held[1])
        await asyncio.wait_for(b, 1)
        assert not a.done()
        await pool.release(held[0])
        await asyncio.wait_for(a, 1)
        await pool.close()

    asyncio.run(run())


def test_s38_a_lease_that_nobody_renews_expires_and_none_comes_back_to_life() -> None:
    async def run() -> None:
        backend = FakeBackend()
        pool = Pool(backend, warm=0, limit=1, lease_s=0.15)
        box = await pool.acquire(SPEC)
        for _ in range(4):
            await asyncio.sleep(0.08)
            box.renew()
        for _ in range(4):
            await asyncio.sleep(0.08)
            await box.exec(["true"])
        await asyncio.sleep(0.4)
        assert not backend.alive and pool.counts["expired"] == 1
        with pytest.raises(SandboxError, match=r"has expired: nothing happened for 0\.15 s"):
            box.renew()
        with pytest.raises(SandboxError, match="has expired"):
            await box.exec(["true"])
        assert (await pool.acquire(SPEC, timeout_s=0.1)).id == "fake-2"
        await pool.release(box)
        assert len(backend.alive) == 1
        await pool.close()

    asyncio.run(run())


def test_metrics_tell_what_happened() -> None:
    async def run() -> None:
        pool = Pool(FakeBackend(), warm=0, limit=1)
        async with pool.lease(SPEC) as box:
            await box.exec(["true"])
            await (await box.shell()).run("false")
            with pytest.raises(DeadlineExceeded):
                await pool.acquire(SPEC, timeout_s=0.01)
            text = pool.metrics()
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert lines['lehr_sandbox_boxes{backend="fake",state="leased"}'] == "1"
        assert lines['lehr_sandbox_leases_total{backend="fake",obtained="cold"}'] == "1"
        assert lines['lehr_sandbox_execs_total{backend="fake",verdict="ok"}'] == "1"
        assert lines['lehr_sandbox_execs_total{backend="fake",verdict="exit"}'] == "1"
        assert lines['lehr_sandbox_lost_total{backend="fake",why="too_late"}'] == "1"
        families = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(families) == len(set(families)) == 6
        await pool.close()

    asyncio.run(run())


def test_a_long_call_holds_its_lease() -> None:
    async def run() -> None:
        pool = Pool(FakeBackend(), warm=0, lease_s=0.05)
        box = await pool.acquire(SPEC)
        async with box._call():  # pyright: ignore[reportPrivateUsage]
            await asyncio.sleep(0.3)
        await box.exec(["true"])
        await pool.close()

    asyncio.run(run())
