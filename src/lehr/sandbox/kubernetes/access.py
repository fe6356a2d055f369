"""How the cluster is reached, and what its refusals mean."""

from __future__ import annotations

import contextlib
import email.utils
import json
import os
import ssl
import time
from collections.abc import Collection, Generator
from importlib import import_module
from pathlib import Path
from typing import Any

from lehr.core.errors import HostUnfit
from lehr.sandbox.errors import SandboxError

CONNECTIONS = 32
IN_CLUSTER = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
RIGHTS = (
    "Grant it in the namespace: create, get, list, patch, delete of pods; get and create of pods/attach and "
    "networkpolicies"
)


def configured(context: str | None) -> tuple[Any, str]:
    """Return the client's configuration, and the namespace that goes with it, or raise ``HostUnfit``.

    context: of the kubeconfig; None for its current one, or for the account of the pod that this runs in.
    """
    client, loading = import_module("kubernetes.client"), import_module("kubernetes.config")
    config, namespace = client.Configuration(), ""
    file = os.environ.get("KUBECONFIG") or None
    try:
        if context is None and file is None and IN_CLUSTER.exists():
            loading.load_incluster_config(client_configuration=config)
            namespace = IN_CLUSTER.read_text().strip()
        else:
            loading.load_kube_config(file, context=context, client_configuration=config)
            known, current = loading.list_kube_config_contexts(file)
            chosen = next((item for item in known if item["name"] == context), current)
            namespace = chosen["context"].get("namespace", "")
    except (loading.ConfigException, OSError) as error:
        raise HostUnfit(
            f"no cluster to make boxes in: {error}",
            expected="a kubeconfig whose current context is the cluster's, or to run in a pod of it",
            hint="Set KUBECONFIG, and look with `kubectl config current-context`",
        ) from error
    config.retries = 0
    config.connection_pool_maxsize = CONNECTIONS
    return config, namespace or "default"


def secured(config: Any) -> dict[str, Any]:
    """Return how a websocket proves who both sides are, as the client's own calls do."""
    options: dict[str, Any] = {"cert_reqs": ssl.CERT_REQUIRED if config.verify_ssl else ssl.CERT_NONE}
    if config.verify_ssl and config.ssl_ca_cert:
        options["ca_certs"] = config.ssl_ca_cert
    if config.verify_ssl and config.assert_hostname is not None:
        options["check_hostname"] = config.assert_hostname
    for name, value in (
        ("certfile", config.cert_file),
        ("keyfile", config.key_file),
        ("server_hostname", config.tls_server_name),
    ):
        if value:
            options[name] = value
    return options


@contextlib.contextmanager
def asking(what: str, where: str, call_s: float, fine: Collection[int]) -> Generator[None]:
    """Turn what the client raises into what lehr says. fine: statuses that are what was wanted."""
    failures, client = import_module("urllib3.exceptions"), import_module("kubernetes.client")
    cluster = f"the cluster at {where}"
    try:
        yield
    except client.ApiException as error:
        status = error.status
        if status in fine:
            return
        said = message(error.body) or error.reason or "no reason given"
        if status in (401, 403):
            raise HostUnfit(f"{cluster} does not let us {what}: {said}", hint=RIGHTS) from error
        kind = HostUnfit if status == 404 else SandboxError
        raise kind(f"{cluster} cannot {what}: {said} (status {status})") from error
    except failures.HTTPError as error:
        cause: Exception = getattr(error, "reason", None) or error
        if isinstance(cause, failures.TimeoutError) and not isinstance(cause, failures.NewConnectionError):
            raise SandboxError(
                f"{cluster} did not {what} within {call_s:g} s", hint="Look whether it is overloaded"
            ) from error
        raise HostUnfit(
            f"{cluster} does not answer: {str(cause)[:300]}",
            expected="a cluster that can be reached from here",
            hint="Look with `kubectl cluster-info`",
        ) from error


def may_pass(error: BaseException) -> float | None:
    """Return how many seconds the cluster asks to be left alone after what :func:`asking` raised, 0 if it does
    not say; None for a failure that stays. One that may pass is 429, 5xx, or no whole answer.
    """
    failures, client = import_module("urllib3.exceptions"), import_module("kubernetes.client")
    cause: Any = error.__cause__
    if isinstance(cause, client.ApiException):
        if cause.status != 429 and not 500 <= (cause.status or 0) < 600:
            return None
        headers: dict[str, Any] = cause.headers or {}
        return _seconds(str(headers.get("Retry-After", "")))
    if isinstance(cause, failures.HTTPError):
        reason: Any = getattr(cause, "reason", None) or cause
        cut = (failures.ProtocolError, failures.TimeoutError, failures.NewConnectionError)
        return 0.0 if isinstance(reason, cut) else None
    return None


def _seconds(after: str) -> float:
    """Read ``Retry-After`` (RFC 9110, section 10.2.3): seconds, or a date."""
    if after.strip().isdigit():
        return float(after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(after).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def message(body: object) -> str:
    """Return the sentence in an error's body."""
    try:
        found: dict[str, Any] = json.loads(body) if isinstance(body, str | bytes) else {}
        return str(found["message"])[:600]
    except (ValueError, KeyError, TypeError):
        return str(body or "")[:600]
