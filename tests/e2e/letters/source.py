"""Asks for letters; a random byte model already writes some, so that groups have variance."""

from lehr.core.task import Gold, Message, Problem, Split, Task
from lehr.domains.base import DomainCard


class Letters:
    def problem(self, card: DomainCard, split: Split, index: int) -> Problem:
        asked = Message(role="user", content=f"letters {split[0]}{index}")
        task = Task(
            id="set-by-the-catalogue",
            domain=card.id,
            messages=(Message(role="system", content="Go."), asked),
            reward=card.reward,
            max_tokens=card.max_tokens,
        )
        return Problem(task, Gold(("abcabcabc",), {}))


SOURCE = Letters()
