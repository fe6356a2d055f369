"""How a run tells a person where it is."""

from __future__ import annotations

from typing import Protocol

Fact = str | float | int


class Observer(Protocol):
    """Sees progress. Called from the run's event loop; must return at once."""

    def stage(self, name: str, total: int | None, unit: str) -> None:
        """A stage (or a part of it) begins; ``total`` is None where it is not known."""
        ...

    def advance(self, done: int, total: int | None = None, **facts: Fact) -> None:
        """Progress within the current stage."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line."""
        ...

    def finish(self, name: str, **facts: Fact) -> None:
        """The stage ended."""
        ...


class Silent:
    """Shows nothing."""

    def stage(self, name: str, total: int | None, unit: str) -> None:
        """Show nothing."""

    def advance(self, done: int, total: int | None = None, **facts: Fact) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""

    def finish(self, name: str, **facts: Fact) -> None:
        """Show nothing."""
