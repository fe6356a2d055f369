"""What the cluster is asked to make: a pod per box, and a policy per namespace that denies them the network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lehr.sandbox import image
from lehr.sandbox.base import Spec
from lehr.sandbox.container.driver import room

USER = 1000
BOX, OWNER = "lehr/box", "lehr/owner"
"""Labels: that it is a box, and whose."""
EXPIRES = "lehr/expires"
"""Annotation: until when (seconds since 1970) its owner is known to live."""
CONTAINER = "box"
POLICY = "lehr-boxes"
DISKS = {"work": "/work", "tmp": "/tmp", "shm": "/dev/shm"}
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def manifest(
    name: str, spec: Spec, system: str, argv: Sequence[str], *, owner: str, expires: float, machine: str,
    runtime_class: str | None, deadline_s: int,
) -> dict[str, Any]:  # fmt: skip
    """Return the body of a pod.

    system: the cluster's name of the image. machine: the processors whose calls our filter knows. deadline_s:
    after which the cluster ends the pod, whatever its owner does.
    """
    limits = spec.limits
    memory, _ = room(limits, own_kernel=is_gvisor(runtime_class))
    size = {"cpu": f"{max(1, round(1000 * limits.cpu))}m", "memory": str(memory)}
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": system,
        "imagePullPolicy": "IfNotPresent",
        "command": list(argv),
        "workingDir": "/",
        "env": [{"name": key, "value": value} for key, value in image.ENVIRONMENT.items()],
        "stdin": True,
        "stdinOnce": True,
        "tty": False,
        "resources": {"requests": size, "limits": size},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": key, "mountPath": path} for key, path in DISKS.items()],
    }
    body: dict[str, Any] = {
        "restartPolicy": "Never",
        "activeDeadlineSeconds": deadline_s,
        "terminationGracePeriodSeconds": 0,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "hostNetwork": False,
        "hostPID": False,
        "hostIPC": False,
        "shareProcessNamespace": False,
        "hostname": "box",
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["127.0.0.1"]},
        "nodeSelector": {
            "kubernetes.io/os": "linux",
            "kubernetes.io/arch": ARCHITECTURES.get(machine, machine),
        },
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [
            {"name": key, "emptyDir": {"medium": "Memory", "sizeLimit": str(limits.disk_bytes)}}
            for key in DISKS
        ],
    }
    if runtime_class:
        body["runtimeClassName"] = runtime_class
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {BOX: "true", OWNER: owner},
            "annotations": {EXPIRES: stamp(expires)},
        },
        "spec": body,
    }


def renewal(expires: float) -> dict[str, Any]:
    """Return the patch by which an owner says that it lives."""
    return {"metadata": {"annotations": {EXPIRES: stamp(expires)}}}


def stamp(moment: float) -> str:
    """Return a moment as the annotation holds it."""
    return str(int(moment))


def policy() -> dict[str, Any]:
    """Return the policy that denies boxes every connection, where the cluster's network enforces policies."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": POLICY},
        "spec": {"podSelector": {"matchLabels": {BOX: "true"}}, "policyTypes": ["Ingress", "Egress"]},
    }


def denies_all(found: Mapping[str, Any]) -> bool:
    """Whether a policy of the cluster is ours as we made it."""
    spec: Mapping[str, Any] = found.get("spec") or {}
    allowed = spec.get("ingress") or spec.get("egress")
    wanted = policy()["spec"]
    selected: Mapping[str, Any] = spec.get("podSelector") or {}
    return (
        not allowed
        and {key: value for key, value in selected.items() if value} == wanted["podSelector"]
        and set(spec.get("policyTypes") or ()) == set(wanted["policyTypes"])
    )


def orphaned(found: Mapping[str, Any], owner: str, now: float) -> bool:
    """Whether nobody has said for too long that a pod's owner lives."""
    meta: Mapping[str, Any] = found.get("metadata") or {}
    labels: Mapping[str, str] = meta.get("labels") or {}
    notes: Mapping[str, str] = meta.get("annotations") or {}
    until = notes.get(EXPIRES, "")
    return BOX in labels and labels.get(OWNER) != owner and until.isdigit() and int(until) < now


def is_gvisor(runtime_class: str | None) -> bool:
    """Whether pods of a runtime class have gVisor's kernel, by its name."""
    return runtime_class is not None and ("gvisor" in runtime_class or "runsc" in runtime_class)
