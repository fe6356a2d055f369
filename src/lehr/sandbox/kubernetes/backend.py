"""The backend ``kubernetes``: each box is a pod."""

from __future__ import annotations

import os

from lehr.sandbox.base import BACKENDS
from lehr.sandbox.container.backend import ContainerBackend
from lehr.sandbox.kubernetes.cluster import CALL_S, Cluster

IMAGE = "python:3.12-slim"
START_S = 120.0
DEADLINE_S = 24 * 3600
SLACK_S = 30.0


class KubernetesBackend(ContainerBackend):
    """Makes boxes in a cluster. Life cycle: see :class:`ContainerBackend`.

    context, namespace: as in a kubeconfig (``LEHR_KUBERNETES_CONTEXT``, ``LEHR_KUBERNETES_NAMESPACE``); by
    default the current context, or the pod's own namespace. image: what ``host`` means
    (``LEHR_KUBERNETES_IMAGE``). runtime_class: such as ``gvisor`` (``LEHR_KUBERNETES_RUNTIME_CLASS``). start_s:
    how long a pod may take to run. deadline_s: after which the cluster ends a pod whatever happens. call_s:
    seconds that one call may take.
    """

    def __init__(
        self,
        *,
        context: str | None = None,
        namespace: str | None = None,
        image: str | None = None,
        runtime_class: str | None = None,
        start_s: float = START_S,
        deadline_s: int = DEADLINE_S,
        call_s: float = CALL_S,
    ) -> None:
        cluster = Cluster(
            context=context or os.environ.get("LEHR_KUBERNETES_CONTEXT") or None,
            namespace=namespace or os.environ.get("LEHR_KUBERNETES_NAMESPACE") or None,
            image=image or os.environ.get("LEHR_KUBERNETES_IMAGE") or IMAGE,
            runtime_class=runtime_class or os.environ.get("LEHR_KUBERNETES_RUNTIME_CLASS") or None,
            start_s=start_s,
            deadline_s=deadline_s,
            call_s=call_s,
        )
        super().__init__("kubernetes", cluster, start_s=start_s + 2 * call_s + SLACK_S)


if "kubernetes" not in list(BACKENDS):
    BACKENDS.register("kubernetes", KubernetesBackend)
