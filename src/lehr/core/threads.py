"""How threads that compute together wait for each other."""

from __future__ import annotations

from collections.abc import MutableMapping

SPINS = "8000"
"""Rounds that a thread of GNU's OpenMP waits awake before it gives its core away, hundreds of microseconds:
few enough to let others run, and enough that an idle machine loses nothing. By default it is some 10 ms: where
cores are shared, the thread that is waited for then cannot run because of the one that waits."""


def share_cores(environment: MutableMapping[str, str]) -> None:
    """Make threads of programs started with ``environment`` give their core away soon when they have to wait.
    It counts when torch is loaded; what the user has set stays.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)
