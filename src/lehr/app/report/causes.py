"""Why attempts failed, in words that can be counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lehr.app.report.summary import Attempt
from lehr.core.reward import Invalid


def cause(attempt: Attempt) -> str | None:
    """Return why an attempt did not pass, or None if it did."""
    if attempt.passed and attempt.valid:
        return None
    reward, trace = attempt.judged.reward, attempt.judged.trace
    if isinstance(reward, Invalid):
        return f"not judged: {reward.reason}"
    if trace.stop == "length":
        return "cut off by the token limit"
    short = {name: value for name, value in reward.parts.items() if value < 1}
    if not short:
        return "below the pass mark"
    name = min(short, key=lambda part: short[part])
    return f"{name}: {'nothing right' if short[name] <= 0 else 'partly right'}"


def count_causes(attempts: Sequence[Attempt]) -> dict[str, Counter[str]]:
    """Return, per cause, how often each stage met it; the most frequent cause first."""
    counts: dict[str, Counter[str]] = {}
    for attempt in attempts:
        why = cause(attempt)
        if why is not None:
            counts.setdefault(why, Counter())[attempt.stage] += 1
    return dict(sorted(counts.items(), key=lambda item: -item[1].total()))
