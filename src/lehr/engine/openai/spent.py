"""What was asked of an API, what it took and what it cost."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lehr.core.trace import Usage
from lehr.engine.openai.settings import Prices


@dataclass(slots=True)
class Spent:
    """Sums over a completer's life.

    answers: requests that were answered. attempts: requests that were sent. failures: attempts without an
    answer, by status or kind. unmetered: answers for which the server told no token counts. cost: None without
    prices.
    """

    answers: int = 0
    attempts: int = 0
    failures: Counter[str] = field(default_factory=Counter[str])
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    unmetered: int = 0
    cost: float | None = None

    def add(self, usage: Usage, cost: float | None) -> None:
        """Count an answer."""
        self.answers += 1
        self.prompt_tokens += usage.prompt_tokens
        self.cached_tokens += usage.cached_tokens
        self.completion_tokens += usage.own_tokens
        if cost is not None:
            self.cost = (self.cost or 0.0) + cost

    def summary(self) -> str:
        """Return one line for a person."""
        line = (
            f"{self.answers} answers in {self.attempts} requests;"
            f" {self.prompt_tokens} prompt tokens ({self.cached_tokens} cached),"
            f" {self.completion_tokens} completion tokens"
        )
        if self.failures:
            line += "; failed: " + ", ".join(f"{n} of {kind}" for kind, n in self.failures.most_common())
        if self.unmetered:
            line += f"; {self.unmetered} answers without token counts"
        return line if self.cost is None else f"{line}; cost {self.cost:.4f}"


def cost_of(usage: Usage, prices: Prices | None) -> float | None:
    """Return the price of a request; None without prices."""
    if prices is None:
        return None
    cached = prices.prompt if prices.cached is None else prices.cached
    fresh = max(0, usage.prompt_tokens - usage.cached_tokens)
    money = fresh * prices.prompt + usage.cached_tokens * cached + usage.own_tokens * prices.completion
    return money / 1e6
