"""Calls to the cluster, each with a deadline, and what its answers mean."""

from __future__ import annotations

import contextlib
import json
import platform
import random
import secrets
import threading
import time
import urllib.parse
from collections.abc import Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, cast

from lehr.core.errors import HostUnfit, LehrError, MissingDependency
from lehr.sandbox.base import Spec
from lehr.sandbox.container.driver import Stream
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.kubernetes import access, pod, status
from lehr.sandbox.kubernetes.attached import PROTOCOL, Attached

CALL_S = 20.0
EXPIRY_S = 300.0
RENEW_S = 60.0
POLL_S = 0.25
PAUSE_S, MOST_PAUSE_S = 0.25, 8.0
"""The pause after a failure that may pass: the first, doubled by each that follows, and the longest."""
HOPELESS = frozenset(
    {
        "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RunContainerError",
        "CreateContainerConfigError", "CreateContainerError", "CrashLoopBackOff",
    }
)  # fmt: skip
"""Why a container waits that will never run."""


class Cluster:
    """See :class:`lehr.sandbox.container.driver.Driver`.

    context: of the kubeconfig, None for the current one, or for the service account where there is no
    kubeconfig. image: what ``host`` means. start_s: how long a pod may take to run.
    """

    alone = False
    renew_s = RENEW_S

    def __init__(
        self, *, context: str | None, namespace: str | None, image: str, runtime_class: str | None,
        start_s: float, deadline_s: int, call_s: float = CALL_S,
    ) -> None:  # fmt: skip
        self._context = context
        self._namespace = namespace or ""
        self._image = image
        self._runtime_class = runtime_class
        self._start_s = start_s
        self._deadline_s = deadline_s
        self._call_s = call_s
        self._config: Any = None
        self._client: Any = None
        self._pods: Any = None
        self._policies: Any = None
        self._names: set[str] = set()
        self._guard = threading.Lock()
        self._owner = f"lehr-{secrets.token_hex(8)}"
        self.own_kernel = pod.is_gvisor(runtime_class)

    @property
    def where(self) -> str:
        """How the cluster is addressed, for messages."""
        return self._config.host if self._config is not None else self._context or "of the current context"

    # --- the connection

    def open(self) -> None:
        """Connect, deny boxes the network, and remove boxes whose owner has expired."""
        try:
            from kubernetes import client
        except ImportError as error:
            raise MissingDependency(
                "the package kubernetes is not installed, which the backend kubernetes needs",
                hint="Install it: `pip install 'lehr[kubernetes]'`",
            ) from error
        self._config, own = access.configured(self._context)
        self._namespace = self._namespace or own
        self._client = client.ApiClient(self._config)
        self._pods, self._policies = client.CoreV1Api(self._client), client.NetworkingV1Api(self._client)
        try:
            self._deny_network()
            self._sweep()
        except BaseException:
            self.close()
            raise

    def _deny_network(self) -> None:
        with self._asking(f"read the network policy {pod.POLICY}", absent_is_fine=True):
            found = self._json(
                self._policies.read_namespaced_network_policy(pod.POLICY, self._namespace, **self._raw())
            )
            if not pod.denies_all(found):
                raise HostUnfit(
                    f"the network policy {pod.POLICY} of {self._namespace} is not the one that boxes need",
                    expected="one that selects all boxes and allows nothing",
                    hint=f"Remove it, so that it is made anew: `kubectl delete networkpolicy {pod.POLICY}`",
                )
            return
        with self._asking(f"make the network policy {pod.POLICY}", conflict_is_fine=True):
            self._policies.create_namespaced_network_policy(self._namespace, pod.policy(), **self._raw())

    def _sweep(self) -> None:
        with self._asking("list pods"):
            found = self._json(
                self._pods.list_namespaced_pod(self._namespace, label_selector=pod.BOX, **self._raw())
            )
        items: list[dict[str, Any]] = found.get("items") or []
        for item in items:
            if pod.orphaned(item, self._owner, time.time()):
                with contextlib.suppress(SandboxError):
                    self.remove(item["metadata"]["name"])

    # --- pods

    def start(self, name: str, spec: Spec, argv: Sequence[str]) -> Stream:
        """Make a pod, wait until it runs, and attach to it; its process 1 says nothing before it hears."""
        system = self._system(spec.image)
        body = pod.manifest(
            name, spec, system, argv, owner=self._owner, expires=time.time() + EXPIRY_S,
            machine=platform.machine(), runtime_class=self._runtime_class, deadline_s=self._deadline_s,
        )  # fmt: skip
        end = time.monotonic() + self._start_s
        with self._guard:
            self._names.add(name)
        with self._asking(f"make pod {name}"):
            self._pods.create_namespaced_pod(self._namespace, body, **self._raw())
        while not self._runs(name, system, end):
            self._pause(name, POLL_S)
        return self._attach(name)

    def _pause(self, name: str, seconds: float) -> None:
        """Wait before a pod is read again. Raises ``SandboxError`` once it was given up."""
        until = time.monotonic() + seconds
        while True:
            if name not in self._names:
                raise SandboxError(f"pod {name} was given up before it ran")
            if (left := until - time.monotonic()) <= 0:
                return
            time.sleep(min(left, POLL_S))

    def _system(self, name: str) -> str:
        if name.startswith(("/", ".", "oci:", "docker:")):
            raise HostUnfit(
                f"the backend kubernetes has no image {name!r}",
                expected="host, or the name of an image in a registry, such as python:3.12-slim",
                hint=f"Push an archive to a registry that the cluster reads; host means {self._image}",
            )
        return self._image if name == "host" else name

    def _read(self, name: str) -> dict[str, Any]:
        with self._asking(f"read pod {name}"):
            return self._json(self._pods.read_namespaced_pod(name, self._namespace, **self._raw()))

    def _read_until(self, name: str, end: float) -> dict[str, Any]:
        """Read a pod; a failure that may pass is waited out, as long as the pod has time."""
        tries, begun = 0, time.monotonic()
        while True:
            try:
                return self._read(name)
            except LehrError as error:
                asked_s = access.may_pass(error)
                if asked_s is None:
                    raise
                tries += 1
                pause_s = asked_s + random.uniform(0.5, 1.0) * min(PAUSE_S * 2 ** (tries - 1), MOST_PAUSE_S)
                if time.monotonic() + pause_s > end:
                    waited_s = time.monotonic() - begun
                    raise SandboxError(
                        f"{error.what}, also not in {tries} tries over {waited_s:.1f} s, and the next would be "
                        f"in {pause_s:.1f} s",
                        expected=f"an answer before pod {name} has had its {self._start_s:g} s to start",
                        hint=error.hint or "Look whether the API server is overloaded, or raise `start_s`",
                    ) from error
            self._pause(name, pause_s)

    def _runs(self, name: str, system: str, end: float) -> bool:
        """Whether a pod runs; raises what it says if it never will, or does not in time."""
        found: dict[str, Any] = self._read_until(name, end).get("status") or {}
        phase, state = found.get("phase", "Pending"), status.container_state(found)
        waiting: dict[str, str] = state.get("waiting") or {}
        if phase == "Running" and "running" in state:
            return True
        why = status.reasons(found)
        if waiting.get("reason") in HOPELESS:
            raise HostUnfit(
                f"pod {name} cannot run {system}: {why}",
                expected="an image that the cluster's nodes can fetch and start",
                hint=f"Look into it: `kubectl -n {self._namespace} describe pod {name}`",
            )
        if phase in ("Failed", "Succeeded"):
            raise SandboxError(f"pod {name} ended before it was attached to: {why}")
        if time.monotonic() > end:
            raise SandboxError(
                f"pod {name} does not run after {self._start_s:g} s ({phase}): {why or 'no node took it'}",
                hint="Give the cluster room, or lower the limits of the spec and the number of boxes",
            )
        return False

    def _attach(self, name: str) -> Stream:
        import websocket

        config = self._config
        query = "container=box&stdin=true&stdout=true&stderr=true&tty=false"
        place = f"/api/v1/namespaces/{urllib.parse.quote(self._namespace)}/pods/{name}/attach?{query}"
        headers = {
            item["key"]: item["value"] for item in config.auth_settings().values() if item["in"] == "header"
        }
        options: dict[str, Any] = {"sslopt": access.secured(config)}
        if config.proxy or config.proxy_headers:
            proxied = import_module("kubernetes.stream.ws_client").websocket_proxycare
            options = proxied(options, config, config.host, headers)
        try:
            web = websocket.create_connection(
                "ws" + config.host.removeprefix("http") + place,
                timeout=self._call_s,
                header=[f"{key}: {value}" for key, value in headers.items() if value],
                subprotocols=[PROTOCOL],
                enable_multithread=True,
                **options,
            )
        except (websocket.WebSocketException, OSError) as error:
            raise SandboxError(
                f"the cluster at {self.where} cannot attach to pod {name}: {str(error)[:300]}",
                hint=access.RIGHTS,
            ) from error
        return Attached(web)

    def give_up(self, name: str) -> None:
        """Look no longer whether a pod runs."""
        with self._guard:
            self._names.discard(name)

    def remove(self, name: str) -> None:
        """Delete a pod at once."""
        self.give_up(name)
        with self._asking(f"delete pod {name}", absent_is_fine=True):
            self._pods.delete_namespaced_pod(name, self._namespace, grace_period_seconds=0, **self._raw())

    def starved(self, name: str) -> bool:
        """Whether a pod's container was ended for want of memory."""
        ended: dict[str, Any] = (
            status.container_state(self._read(name).get("status") or {}).get("terminated") or {}
        )
        return ended.get("reason") == "OOMKilled"

    def renew(self) -> None:
        """Put off the moment after which others take our pods for orphans."""
        with self._guard:
            names = list(self._names)
        failed: LehrError | None = None
        for name in names:
            try:
                with self._asking(f"renew pod {name}", absent_is_fine=True):
                    self._pods.patch_namespaced_pod(
                        name,
                        self._namespace,
                        pod.renewal(time.time() + EXPIRY_S),
                        _content_type="application/merge-patch+json",
                        **self._raw(),
                    )
            except LehrError as error:
                failed = error
        if failed is not None:
            raise failed

    def close(self) -> None:
        """Disconnect."""
        if self._client is not None:
            self._client.close()
        self._client = self._pods = self._policies = None

    # --- calls

    def _raw(self) -> dict[str, Any]:
        """Return the options of every call: as JSON, and not for ever."""
        return {"_preload_content": False, "_request_timeout": self._call_s}

    def _json(self, response: Any) -> dict[str, Any]:
        """Return the object that was answered; what stands before a cluster may answer anything."""
        try:
            found = json.loads(response.data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise SandboxError(
                f"the cluster at {self.where} answered what no API server does: {response.data[:200]!r}",
                hint="Look whether a proxy answers in its place",
            )
        return cast("dict[str, Any]", found)

    def _asking(
        self, what: str, *, absent_is_fine: bool = False, conflict_is_fine: bool = False
    ) -> AbstractContextManager[None]:
        if self._pods is None:
            raise SandboxError(f"cannot {what}: the backend is closed")
        fine = {404} if absent_is_fine else {409} if conflict_is_fine else set[int]()
        return access.asking(what, self.where, self._call_s, fine)
