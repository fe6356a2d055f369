"""A short soak; the long one is a command of its own."""

from __future__ import annotations

import asyncio
import importlib.util
from dataclasses import replace
from pathlib import Path

SOAK = Path(__file__).parents[2] / "soak" / "leases.py"


def test_leases_with_faults_leave_nothing_behind() -> None:
    spec = importlib.util.spec_from_file_location("soak_leases", SOAK)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    before, after, ends = asyncio.run(module.soak(120, seed=1))
    assert ends.total() == 120
    assert ends["use"] > 40 and ends["cancelled"] > 3
    ours = {
        "disk_bytes": 0,
        "shared_memory": 0,
        "folders": 0,
    }  # other tests share the machine's temporary folders
    assert replace(before, **ours) == replace(after, **ours)
