"""Reading what the cluster says about a pod."""

from __future__ import annotations

from typing import Any


def container_state(status: dict[str, Any]) -> dict[str, Any]:
    """Return in what state a pod's only container is."""
    found: list[dict[str, Any]] = status.get("containerStatuses") or [{}]
    return found[0].get("state") or {}


def reasons(status: dict[str, Any]) -> str:
    """Return all that the cluster says about why a pod does not run."""
    found: list[dict[str, Any]] = [*container_state(status).values(), *(status.get("conditions") or [])]
    found = [item for item in found if item and item.get("status") != "True"] + [status]
    said = [f"{item.get('reason', '')} {item.get('message', '')}".strip() for item in found]
    return "; ".join(dict.fromkeys(text for text in said if text))[:600]
