"""What ``GET /metrics`` shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lehr.core.prometheus import Histogram, family
from lehr.engine.base import EngineStats

PREFIX = "lehr_serve"
_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Meter:
    """Counts of one server. Tokens are counted by the engine, those of aborted requests too."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self.first_token = Histogram(
            f"{PREFIX}_time_to_first_token_seconds", "From the request's arrival to its first token", _FIRST_S
        )
        self.per_token = Histogram(
            f"{PREFIX}_time_per_output_token_seconds",
            "Between one token of a completion and the next",
            _TOKEN_S,
        )

    def answered(self, path: str, status: int) -> None:
        """Count a request; 499 is a client that left."""
        self._requests[path, status] += 1

    def exposition(self, stats: EngineStats | None) -> str:
        """Return the text; without ``stats``, the engine is broken."""
        return "\n".join(self._lines(stats)) + "\n"

    def _lines(self, stats: EngineStats | None) -> Iterator[str]:
        requests = [({"path": p, "status": str(s)}, float(c)) for (p, s), c in sorted(self._requests.items())]
        yield from family(f"{PREFIX}_requests_total", "counter", "Requests by status", requests)
        up = 0.0 if stats is None else 1.0
        yield from family(f"{PREFIX}_engine_up", "gauge", "Whether the engine works", [({}, up)])
        if stats is not None:
            for name, value in (("running", stats.running), ("waiting", stats.waiting)):
                yield from family(f"{PREFIX}_{name}", "gauge", f"Completions that are {name}", [({}, value)])
            tokens = (
                ("prompt_tokens_total", "Tokens of prompts", stats.prompt_tokens),
                ("cached_tokens_total", "Tokens of prompts found in the prefix cache", stats.cached_tokens),
                ("output_tokens_total", "Tokens sampled", stats.own_tokens),
            )
            for name, text, value in tokens:
                yield from family(f"{PREFIX}_{name}", "counter", text, [({}, value)])
            yield from _cache(stats)
        yield from self.first_token.lines()
        yield from self.per_token.lines()


def _cache(stats: EngineStats) -> Iterator[str]:
    """Yield what the block pool and the slower tiers hold and did."""
    tiers = stats.tiers
    blocks = (("free", stats.blocks_free), ("cached", stats.blocks_cached), ("held", stats.blocks_held))
    yield from family(
        f"{PREFIX}_cache_blocks",
        "gauge",
        "Blocks of the cache of keys and values, by state",
        [({"state": state}, float(count)) for state, count in blocks],
    )
    sizes = (("queue", tiers.queued_bytes), ("memory", tiers.memory_bytes), ("disk", tiers.disk_bytes))
    yield from family(
        f"{PREFIX}_tier_bytes",
        "gauge",
        "Bytes of keys and values in slower tiers",
        [({"tier": tier}, float(count)) for tier, count in sizes],
    )
    hits = (("memory", tiers.memory_hits), ("disk", tiers.disk_hits))
    yield from family(
        f"{PREFIX}_tier_hit_blocks_total",
        "counter",
        "Blocks loaded back from slower tiers",
        [({"tier": tier}, float(count)) for tier, count in hits],
    )
    counts = (
        ("tier_stored_blocks_total", "Blocks queued for slower tiers", tiers.stored_blocks),
        ("tier_dropped_segments_total", "Segments no tier had room for any more", tiers.dropped),
        ("tier_damaged_segments_total", "Segments that were damaged or gone when read", tiers.damaged),
        ("tier_loads_total", "Prefixes loaded because that was expected to be faster", tiers.chosen),
        ("tier_recomputes_total", "Prefixes computed because that was expected to be faster", tiers.refused),
    )
    for name, text, count in counts:
        yield from family(f"{PREFIX}_{name}", "counter", text, [({}, float(count))])
