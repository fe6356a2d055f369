"""What a benchmark reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """A value of ours beside a peer's. ``ratio`` above 1 means that we are better, whatever the unit."""

    name: str
    value: float
    unit: str
    peer: str
    peer_value: float
    ratio: float

    @classmethod
    def throughput(cls, name: str, value: float, unit: str, peer: str, peer_value: float) -> Row:
        """Return a row where more is better."""
        return cls(name, value, unit, peer, peer_value, value / peer_value)

    @classmethod
    def duration(cls, name: str, value: float, unit: str, peer: str, peer_value: float) -> Row:
        """Return a row where less is better."""
        return cls(name, value, unit, peer, peer_value, peer_value / value)

    def __str__(self) -> str:
        return (
            f"{self.name:<24} {self.value:9.3g} {self.unit}   {self.peer} {self.peer_value:.3g} {self.unit}"
            f"   ratio {self.ratio:.2f}"
        )
