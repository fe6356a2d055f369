"""How threads that compute together wait for each other."""

from __future__ import annotations

from collections.abc import MutableMapping

SPINS = "1000"
"""Rounds that a thread of GNU's OpenMP waits awake, tens of microseconds, before it gives its core away. By
default it is some 10 ms: when anything else wants a core, the thread that is waited for then cannot run because
of the one that waits, and a step of a small model takes ten to thirty times as long."""


def share_cores(environment: MutableMapping[str, str]) -> None:
    """Make threads of programs started with ``environment`` give their core away soon when they have to wait.
    It counts when torch is loaded; what the user has set stays.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)
