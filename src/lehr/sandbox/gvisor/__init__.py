"""Boxes on gVisor (``runsc``): a kernel of their own in user space between programs and this machine's.

``bundle`` is the image as an OCI bundle, ``runsc`` drives the binary, ``sandbox`` is one container's processes,
``box`` is the box and its recorded state, ``backend`` makes boxes. What runs inside is ``inside/relay.py``, the
same runner as bubblewrap's except for how bytes travel.
"""

from __future__ import annotations

from collections.abc import Mapping

INAPPLICABLE: Mapping[str, str] = {
    "S4": (
        "memory is measured from within, many times a second; a bomb that is faster meets the control group, "
        "which ends gVisor's kernel and the box with it (S41 holds: it is named, the next box is whole)"
    ),
    "S6-inodes": "gVisor's tmpfs limits bytes, not files; its memory for many files is bounded by the group",
    "S17-convention": (
        "gVisor on ptrace reads a 32-bit call as the call of that number of its own, under the same filter"
    ),
    "S19": (
        "gVisor's /proc shows environment, maps and descriptor numbers of process 1 to all, which hold no "
        "secret; tracing it, its memory and opening its descriptors are refused (S17, unit tests)"
    ),
    "S24": (
        "niceness and oom_score_adj are numbers of gVisor's own, which the host's scheduler never sees; "
        "CPU time is limited by the host's count, not by an rlimit"
    ),
}
"""Cases of the conformance suite that boxes on gVisor do not hold, and why."""
