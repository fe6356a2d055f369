"""How much work may be started, so that nothing is trained on weights that are too old.

The rule of AReaL (arXiv 2505.24298): at version v, with batches of B groups and a bound of
eta versions, no more than ``(v + eta + 1) * B`` groups may ever have been started. A slow group is never
thrown away; it holds its place, and fewer new ones are let in.
"""

from __future__ import annotations

from dataclasses import dataclass

from lehr.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Admission:
    """Grants places. A pure function of what it is asked with, so that there is nothing to restore.

    bound: versions that a group may lag behind; 0 is synchronous training.
    groups_per_batch: groups that one version consumes.
    """

    bound: int
    groups_per_batch: int

    def __post_init__(self) -> None:
        if self.bound < 0 or self.groups_per_batch < 1:
            raise ConfigError(
                f"admission with bound {self.bound} and {self.groups_per_batch} groups per batch",
                expected="a bound of at least 0 and at least 1 group per batch",
            )

    def capacity(self, version_n: int, started: int) -> int:
        """Return how many more groups may be started, never negative.

        version_n: versions trained so far. started: groups ever started that were not dropped: those
        trained, waiting and running.
        """
        return max(0, (self.bound + version_n + 1) * self.groups_per_batch - started)
