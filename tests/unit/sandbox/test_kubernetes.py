"""The kubernetes backend against an API server that speaks the real protocol and runs the real process 1."""

from __future__ import annotations

import asyncio
import email.utils
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import process_one
import pytest
from fake_cluster import OUTPUT, ClusterHandler, Dropped, FakeCluster, FakePod

from lehr.core.errors import HostUnfit, MissingDependency
from lehr.sandbox.base import BACKENDS, Limits, Spec
from lehr.sandbox.conformance import CASES
from lehr.sandbox.container.driver import OWN_BYTES
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.kubernetes import attached, cluster, pod, status
from lehr.sandbox.kubernetes.backend import DEADLINE_S, IMAGE, KubernetesBackend
from lehr.sandbox.pool import Pool

pytest.importorskip("kubernetes", reason="the extra lehr[kubernetes] is not installed")

LIMITS = Limits(memory_bytes=128 << 20, disk_bytes=8 << 20, pids=24, cpu=0.5, wall_s=10.0)
SMALL = Spec(limits=LIMITS)
Use = Callable[[KubernetesBackend], Awaitable[Any]]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    process_one.require()
    made = FakeCluster(tmp_path)
    made.start()
    monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig))
    monkeypatch.setattr(cluster, "POLL_S", 0.02)
    yield made
    made.stop()


def with_backend(use: Use, **options: Any) -> Any:
    async def run() -> Any:
        backend = KubernetesBackend(**options)
        try:
            return await use(backend)
        finally:
            await backend.close()

    return asyncio.run(run())


# --- what is asked for


def body(runtime_class: str | None = None, machine: str = "x86_64") -> dict[str, Any]:
    return pod.manifest(
        "lehr-1", SMALL, "an-image", ["python3"], owner="lehr-2", expires=1234.5, machine=machine,
        runtime_class=runtime_class, deadline_s=60,
    )  # fmt: skip


def test_a_pod_is_as_little_as_a_program_can_live_in() -> None:
    asked = body()
    spec = asked["spec"]
    (container,) = spec["containers"]
    assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
    assert spec["restartPolicy"] == "Never" and spec["activeDeadlineSeconds"] == 60
    assert not any(spec[name] for name in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"))
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "privileged": False,
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
    }
    memory = str(LIMITS.memory_bytes + LIMITS.disk_bytes + OWN_BYTES)
    assert (
        container["resources"]["requests"]
        == container["resources"]["limits"]
        == {"cpu": "500m", "memory": memory}
    )
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/work", "/tmp", "/dev/shm"}
    for volume in spec["volumes"]:
        assert volume["emptyDir"] == {"medium": "Memory", "sizeLimit": str(LIMITS.disk_bytes)}
    assert container["stdin"] and container["stdinOnce"] and not container["tty"]
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    assert body(machine="aarch64")["spec"]["nodeSelector"]["kubernetes.io/arch"] == "arm64"
    assert "runtimeClassName" not in spec and body("gvisor")["spec"]["runtimeClassName"] == "gvisor"
    assert asked["metadata"]["labels"] == {pod.BOX: "true", pod.OWNER: "lehr-2"}
    assert asked["metadata"]["annotations"] == {pod.EXPIRES: "1234"}


def test_a_policy_is_ours_only_if_it_denies_everything() -> None:
    good = pod.policy()
    assert pod.denies_all(good)
    assert pod.denies_all({**good, "spec": {**good["spec"], "ingress": [], "egress": None}})
    for odd in ({"egress": [{}]}, {"policyTypes": ["Ingress"]}, {"podSelector": {"matchLabels": {"a": "b"}}}):
        assert not pod.denies_all({**good, "spec": {**good["spec"], **odd}})


def test_orphans_are_those_whose_owner_said_nothing_for_too_long() -> None:
    def made(labels: dict[str, str], notes: dict[str, str]) -> dict[str, Any]:
        return {"metadata": {"name": "a", "labels": labels, "annotations": notes}}

    theirs = {pod.BOX: "true", pod.OWNER: "theirs"}
    assert pod.orphaned(made(theirs, {pod.EXPIRES: "99"}), "ours", 100.0)
    assert not pod.orphaned(made(theirs, {pod.EXPIRES: "101"}), "ours", 100.0)
    assert not pod.orphaned(made({**theirs, pod.OWNER: "ours"}, {pod.EXPIRES: "99"}), "ours", 100.0)
    assert not pod.orphaned(made({}, {pod.EXPIRES: "99"}), "ours", 100.0)
    assert not pod.orphaned(made(theirs, {}), "ours", 100.0)
    assert not pod.orphaned(made(theirs, {pod.EXPIRES: "soon"}), "ours", 100.0)


# --- boxes


def test_a_box_works_as_any_other(fake: FakeCluster) -> None:
    async def use(backend: KubernetesBackend) -> None:
        box = await backend.create(SMALL)
        assert fake.asked[:4] == ["read_policy", "create_policy", "list", "create"]
        assert fake.asked[-1] == "attach"
        assert pod.denies_all(fake.policies[pod.POLICY])
        (asked,) = fake.created
        assert asked["spec"]["containers"][0]["image"] == IMAGE
        assert asked["spec"]["activeDeadlineSeconds"] == DEADLINE_S
        assert float(asked["metadata"]["annotations"][pod.EXPIRES]) > time.time() + 200
        kept = {name: value for name, value in asked["spec"].items() if name != "containers"}
        wanted = {name: value for name, value in body()["spec"].items() if name != "containers"}
        assert kept == {**wanted, "activeDeadlineSeconds": DEADLINE_S}
        result = await box.exec(["sh", "-c", "cat; echo said >&2; exit 3"], stdin=b"fed")
        assert (result.verdict, result.exit_code) == ("exit", 3)
        assert (result.stdout, result.stderr) == (b"fed", b"said\n")
        big = os.urandom(1 << 20)
        result = await box.exec(["sh", "-c", "wc -c; head -c 300000 /dev/zero"], stdin=big)
        assert result.stdout == b"%d\n" % len(big) + bytes(300_000)
        await box.write("a/b", big[:200_000])
        assert await box.tree() == {"a": None, "a/b": big[:200_000]}
        async with box.shell() as shell:
            assert (await shell.run("cd /tmp; x=5; (exit 7)")).exit_code == 7
            assert (await shell.run("echo $x; pwd")).stdout == b"5\n/tmp\n"
        await box.destroy()
        await box.destroy()
        assert fake.pods == {} and fake.asked.count("delete") == 1
        assert (await box.exec(["true"])).verdict == "broken"
        await backend.create(SMALL)
        assert fake.asked.count("create_policy") == fake.asked.count("list") == 1

    with_backend(use)


@pytest.mark.parametrize(
    ("argv", "verdict"),
    [
        (["no-such-program"], "exit"),
        (["sh", "-c", "kill -9 $$"], "signal"),
        (["sleep", "60"], "timeout_wall"),
        (["python3", "-c", "a=[]\nwhile 1: a.append(bytearray(1<<20))"], "oom"),
        (["sh", "-c", "head -c 20000000 /dev/zero > /dev/shm/full"], "disk"),
    ],
)
def test_what_ended_a_program_is_named(fake: FakeCluster, argv: list[str], verdict: str) -> None:
    async def use(backend: KubernetesBackend) -> None:
        box = await backend.create(SMALL)
        result = await box.exec(argv, timeout_s=1.5 if verdict == "timeout_wall" else None)
        assert result.verdict == verdict, result
        assert (await box.exec(["echo", "on"])).stdout == b"on\n"

    with_backend(use)


@pytest.mark.parametrize("case", ["S2", "S14", "S17", "S31"])
def test_promises_hold_by_what_is_inside(fake: FakeCluster, case: str) -> None:
    async def use(backend: KubernetesBackend) -> None:
        pool = Pool(backend, warm=0)
        await CASES[case](pool)
        await pool.close()

    with_backend(use)


def test_settings_by_environment(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEHR_KUBERNETES_IMAGE", "ours:1")
    monkeypatch.setenv("LEHR_KUBERNETES_CONTEXT", "fake")
    monkeypatch.setenv("LEHR_KUBERNETES_NAMESPACE", "boxes")

    async def use(backend: KubernetesBackend) -> None:
        await backend.create(SMALL)
        await backend.create(Spec("theirs:2", LIMITS))
        images = [asked["spec"]["containers"][0]["image"] for asked in fake.created]
        assert images == ["ours:1", "theirs:2"]
        with pytest.raises(HostUnfit, match="no image '/a/folder'"):
            await backend.create(Spec("/a/folder", LIMITS))

    with_backend(use)


# --- what goes wrong


def test_no_package_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(MissingDependency, match=r"pip install 'lehr\[kubernetes\]'"):
        asyncio.run(KubernetesBackend().create(SMALL))


def test_no_kubeconfig_is_one_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    with pytest.raises(HostUnfit, match=r"no cluster to make boxes in.*Set KUBECONFIG"):
        asyncio.run(KubernetesBackend().create(SMALL))


def test_no_cluster_is_one_message(fake: FakeCluster) -> None:
    fake.stop()

    async def use(backend: KubernetesBackend) -> None:
        with pytest.raises(
            HostUnfit, match=rf"cluster at {fake.url} does not answer.*kubectl cluster-info"
        ) as error:
            await backend.create(SMALL)
        assert len(str(error.value)) < 700

    with_backend(use)


@pytest.mark.parametrize(
    ("endpoint", "code", "kind", "expected"),
    [
        ("create_policy", 403, HostUnfit, "does not let us make the network policy .*Grant it"),
        ("create", 404, HostUnfit, r"said so \(status 404\)"),
        ("create", 409, SandboxError, r"said so \(status 409\)"),
        ("create", 422, SandboxError, r"said so \(status 422\)"),
        ("create", 500, SandboxError, r"said so \(status 500\)"),
        ("attach", 403, SandboxError, "cannot attach to pod .*pods/attach"),
    ],
)
def test_a_refusal_is_passed_on_and_nothing_is_left(
    fake: FakeCluster, endpoint: str, code: int, kind: type[Exception], expected: str
) -> None:
    fake.failures[endpoint] = (code, "the cluster said so")

    async def use(backend: KubernetesBackend) -> None:
        with pytest.raises(kind, match=expected):
            await backend.create(SMALL)
        fake.failures.clear()
        assert (await (await backend.create(SMALL)).exec(["true"])).verdict == "ok"

    with_backend(use)
    assert fake.pods == {}


@pytest.mark.parametrize("endpoint", ["do_read_policy", "do_list", "do_read"])
@pytest.mark.parametrize("said", [b"<html>", b"", b"[]", b"null"])
def test_an_answer_that_is_none_of_an_api_server_is_named(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch, endpoint: str, said: bytes
) -> None:
    def answer(handler: ClusterHandler, *_: Any) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(said)))
        handler.end_headers()
        handler.wfile.write(said)

    monkeypatch.setattr(ClusterHandler, endpoint, answer)

    async def use(backend: KubernetesBackend) -> None:
        with pytest.raises(SandboxError, match="answered what no API server does"):
            await backend.create(SMALL)

    with_backend(use)
    assert fake.pods == {}


def test_another_policy_of_that_name_is_not_taken_for_ours(fake: FakeCluster) -> None:
    fake.policies[pod.POLICY] = {**pod.policy(), "spec": {**pod.policy()["spec"], "egress": [{}]}}

    async def use(backend: KubernetesBackend) -> None:
        with pytest.raises(HostUnfit, match=r"not the one that boxes need.*kubectl delete networkpolicy"):
            await backend.create(SMALL)

    with_backend(use)


def test_a_pod_that_never_runs_says_why(fake: FakeCluster) -> None:
    def missing(made: FakePod) -> None:
        made.set("Pending", waiting={"reason": "ErrImagePull", "message": "no such image: absent:1"})

    def full(made: FakePod) -> None:
        made.status = {
            "phase": "Pending",
            "conditions": [{"status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}],
        }

    def ended(made: FakePod) -> None:
        made.set("Failed", terminated={"reason": "Error", "message": "no python3"})

    async def use(backend: KubernetesBackend) -> None:
        for outcome, kind, expected in (
            (missing, HostUnfit, "cannot run absent:1: ErrImagePull no such image"),
            (full, SandboxError, r"does not run after 0\.5 s \(Pending\): Unschedulable 0/3 nodes"),
            (ended, SandboxError, "ended before it was attached to: Error no python3"),
        ):
            fake.outcome = outcome
            with pytest.raises(kind, match=expected):
                await backend.create(Spec("absent:1", LIMITS))

    with_backend(use, start_s=0.5)
    assert fake.pods == {}


def test_a_cluster_that_hangs_is_waited_for_only_so_long(fake: FakeCluster) -> None:
    fake.before["list"] = lambda: time.sleep(1.0)

    async def use(backend: KubernetesBackend) -> None:
        with pytest.raises(SandboxError, match=r"did not list pods within 0\.3 s"):
            await backend.create(SMALL)

    with_backend(use, call_s=0.3)


@pytest.mark.parametrize("failure", [429, 500, 503, "cut"])
def test_a_failure_that_passes_costs_no_box(fake: FakeCluster, failure: int | str) -> None:
    reads: list[float] = []

    def fail_twice() -> None:
        reads.append(time.monotonic())
        fake.failures.pop("read", None)
        if len(reads) > 2:
            return
        if isinstance(failure, str):
            raise Dropped
        fake.failures["read"] = (failure, "the cluster is busy")

    fake.before["read"] = fail_twice

    async def use(backend: KubernetesBackend) -> None:
        assert (await (await backend.create(SMALL)).exec(["true"])).verdict == "ok"

    with_backend(use)
    assert len(reads) > 2 and fake.asked.count("create") == 1
    assert reads[1] - reads[0] >= cluster.PAUSE_S / 2 and reads[2] - reads[1] >= cluster.PAUSE_S


@pytest.mark.parametrize("date", [False, True])
def test_a_cluster_that_says_when_to_ask_again_is_heeded(fake: FakeCluster, date: bool) -> None:
    reads: list[float] = []
    fake.headers["Retry-After"] = email.utils.formatdate(time.time() + 3, usegmt=True) if date else "1"

    def fail_once() -> None:
        reads.append(time.monotonic())
        fake.failures["read"] = (429, "later")
        if len(reads) > 1:
            del fake.failures["read"]

    fake.before["read"] = fail_once

    async def use(backend: KubernetesBackend) -> None:
        await backend.create(SMALL)

    with_backend(use)
    assert reads[1] - reads[0] >= 1


@pytest.mark.parametrize("retry_after", ["", "60"])
def test_a_failure_that_stays_is_told_when_the_pod_has_no_time_left(
    fake: FakeCluster, retry_after: str
) -> None:
    fake.failures["read"] = (503, "etcd is away")
    if retry_after:
        fake.headers["Retry-After"] = retry_after
    started = time.monotonic()

    async def use(backend: KubernetesBackend) -> None:
        with pytest.raises(
            SandboxError, match=r"etcd is away \(status 503\), also not in \d+ tr.*has had its 1 s"
        ):
            await backend.create(SMALL)

    with_backend(use, start_s=1.0)
    assert time.monotonic() - started < 4
    assert fake.pods == {}
    assert (fake.asked.count("read") == 1) is bool(retry_after), (
        "nobody asks before it was told to, or gives up"
    )


@pytest.mark.parametrize("status", [400, 403, 404, 409])
def test_a_refusal_to_read_a_pod_is_told_at_once(fake: FakeCluster, status: int) -> None:
    fake.failures["read"] = (status, "the cluster said so")

    async def use(backend: KubernetesBackend) -> None:
        with pytest.raises((SandboxError, HostUnfit), match="the cluster said so"):
            await backend.create(SMALL)

    with_backend(use)
    assert fake.asked.count("read") == 1 and fake.pods == {}


def test_a_pod_that_was_given_up_ends_the_wait_for_a_busy_cluster(fake: FakeCluster) -> None:
    fake.failures["read"] = (429, "later")
    fake.headers["Retry-After"] = "60"

    async def use(backend: KubernetesBackend) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await backend.create(SMALL)
        end = time.monotonic() + 5
        while fake.pods and time.monotonic() < end:
            await asyncio.sleep(0.02)
        assert fake.pods == {}

    with_backend(use)


def test_a_stream_that_is_cut_breaks_the_box(fake: FakeCluster) -> None:
    async def use(backend: KubernetesBackend) -> None:
        box = await backend.create(SMALL)
        running = asyncio.create_task(box.exec(["sh", "-c", "echo begun; sleep 60"]))
        await asyncio.sleep(0.3)
        (made,) = fake.pods.values()
        assert made.web
        made.web.cut()
        result = await asyncio.wait_for(running, 5)
        assert result.verdict == "broken" and result.stdout == b"begun\n", result
        with pytest.raises(SandboxError):
            await box.read("a")

    with_backend(use)
    assert fake.pods == {}


def test_nonsense_on_the_stream_breaks_the_box(fake: FakeCluster) -> None:
    async def use(backend: KubernetesBackend) -> None:
        box = await backend.create(SMALL)
        (made,) = fake.pods.values()
        assert made.web
        made.web.send(OUTPUT, b"\0\0\0\2\0\0\0\0[]")
        assert (await asyncio.wait_for(box.exec(["true"]), 5)).verdict == "broken"

    with_backend(use)


def test_a_pod_that_was_ended_for_memory_is_believed(fake: FakeCluster) -> None:
    async def use(backend: KubernetesBackend) -> None:
        box = await backend.create(SMALL)
        running = asyncio.create_task(box.exec(["sleep", "60"]))
        await asyncio.sleep(0.2)
        (made,) = fake.pods.values()
        made.set("Failed", terminated={"reason": "OOMKilled", "exitCode": 137})
        assert made.web
        made.web.cut()
        assert (await asyncio.wait_for(running, 5)).verdict == "oom"

    with_backend(use)


def test_a_quiet_connection_is_kept_alive(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attached, "IDLE_S", 0.1)

    async def use(backend: KubernetesBackend) -> None:
        box = await backend.create(SMALL)
        (made,) = fake.pods.values()
        end = time.monotonic() + 5
        while not (made.web and made.web.pings >= 2) and time.monotonic() < end:
            await asyncio.sleep(0.05)
        assert made.web and made.web.pings >= 2
        assert (await box.exec(["echo", "on"])).stdout == b"on\n"

    with_backend(use)


# --- nothing is left behind


@pytest.mark.parametrize("endpoint", ["list", "create", "read", "attach"])
def test_a_cancelled_caller_leaves_nothing(fake: FakeCluster, endpoint: str) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        reached.set()
        go_on.wait(5)

    fake.before[endpoint] = wait

    async def use(backend: KubernetesBackend) -> None:
        making = asyncio.create_task(backend.create(SMALL))
        await asyncio.to_thread(reached.wait, 5)
        making.cancel()
        started = time.monotonic()
        with pytest.raises(asyncio.CancelledError):
            await making
        assert time.monotonic() - started < 1, "who gave up does not wait for the cluster"
        go_on.set()

    with_backend(use)
    assert fake.pods == {}


def test_nobody_waits_for_a_pod_that_was_given_up(fake: FakeCluster) -> None:
    fake.outcome = lambda made: made.set("Pending", waiting={"reason": "ContainerCreating"})

    async def use(backend: KubernetesBackend) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await backend.create(SMALL)
        end = time.monotonic() + 5
        while fake.pods and time.monotonic() < end:
            await asyncio.sleep(0.02)
        assert fake.pods == {}, "long before the pod's own time is over"

    with_backend(use, start_s=60.0)


def test_a_live_owner_says_so_and_others_are_removed_at_the_next_start(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def theirs(name: str, until: float) -> None:
        made = body()
        fake.add(
            {
                **made,
                "metadata": {**made["metadata"], "name": name, "annotations": {pod.EXPIRES: str(int(until))}},
            }
        )

    theirs("orphan", time.time() - 10)
    theirs("alive", time.time() + 60)
    fake.add({"metadata": {"name": "somebody's", "labels": {}}, "spec": {}})
    monkeypatch.setattr(cluster.Cluster, "renew_s", 0.05)

    async def use(backend: KubernetesBackend) -> None:
        await backend.create(SMALL)
        (name,) = set(fake.pods) - {"alive", "somebody's"}
        first = fake.pods[name].body["metadata"]["annotations"][pod.EXPIRES]
        end = time.monotonic() + 5
        while fake.pods[name].body["metadata"]["annotations"][pod.EXPIRES] == first and time.monotonic() < end:
            await asyncio.sleep(0.05)
        assert int(fake.pods[name].body["metadata"]["annotations"][pod.EXPIRES]) > int(first)
        assert {patched for patched, _, _ in fake.patches} == {name}, "only what is ours"
        assert {kind for _, _, kind in fake.patches} == {"application/merge-patch+json"}

    with_backend(use)
    assert set(fake.pods) == {"alive", "somebody's"}


# --- parts


def test_what_the_cluster_says_is_put_into_one_sentence() -> None:
    found = {
        "phase": "Pending",
        "reason": "Evicted",
        "conditions": [
            {"status": "True", "reason": "fine"},
            {"status": "False", "reason": "Unschedulable", "message": "full"},
        ],
        "containerStatuses": [{"state": {"waiting": {"reason": "PodInitializing"}}}],
    }
    assert status.reasons(found) == "PodInitializing; Unschedulable full; Evicted"
    assert status.reasons({}) == ""


def test_registered() -> None:
    assert BACKENDS.get("kubernetes") is KubernetesBackend
