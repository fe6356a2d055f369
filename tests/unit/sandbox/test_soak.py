"""A short soak; the long one is a command of its own."""

from __future__ import annotations

import asyncio
import importlib.util
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "soak" / "leases.py"


def test_leases_with_faults_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests write to the machine's
    spec = importlib.util.spec_from_file_location("soak_leases", SOAK)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    before, after, ends = asyncio.run(module.soak(120, seed=1))
    assert ends.total() == 120
    assert ends["use"] > 40 and ends["cancelled"] > 3
    assert replace(before, shared_memory=0) == replace(after, shared_memory=0)
