"""The pool's counts for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lehr.core.prometheus import family

HOW = ("warm", "cold", "snapshot")
PREFIX = "lehr_sandbox"


def exposition(backend: str, boxes: Mapping[str, int], counts: Mapping[str, int]) -> str:
    """Return gauges of ``boxes`` by state, and counters of leases, execs and failures."""
    return "\n".join(_lines(backend, boxes, counts)) + "\n"


def _lines(backend: str, boxes: Mapping[str, int], counts: Mapping[str, int]) -> Iterator[str]:
    execs = {key.removeprefix("exec "): count for key, count in counts.items() if key.startswith("exec ")}
    leases = {how: counts.get(how, 0) for how in HOW}
    yield from _family("boxes", "gauge", "Boxes and waiters by state", backend, "state", boxes)
    yield from _family("leases_total", "counter", "Leases begun, by origin", backend, "obtained", leases)
    yield from _family("execs_total", "counter", "Calls by what ended them", backend, "verdict", execs)
    ends = {"expired": counts.get("expired", 0), "too_late": counts.get("too_late", 0)}
    yield from _family("lost_total", "counter", "Expired leases, waiters out of time", backend, "why", ends)
    yield from _family(
        "made_warm_total", "counter", "Boxes made ahead", backend, "", {"": counts.get("made_warm", 0)}
    )
    queued = counts.get("queue_us", 0) / 1e6
    yield from _family("queue_seconds_total", "counter", "Seconds in line", backend, "", {"": queued})


def _family(
    name: str, kind: str, text: str, backend: str, label: str, values: Mapping[str, float]
) -> Iterator[str]:
    samples = [({"backend": backend} | ({label: v} if label else {}), n) for v, n in values.items()]
    yield from family(f"{PREFIX}_{name}", kind, text, samples)
