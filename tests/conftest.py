"""What holds for every test: a requirement that is missing skips on a laptop and fails in CI."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from lehr.core.threads import share_cores

share_cores(os.environ)
"""Test processes run side by side: before any of them loads torch."""

ELSEWHERE = "other host: "
"""A skip whose reason starts like this is also accepted in CI: what is tested exists elsewhere only."""


def _refused(longrepr: Any) -> str | None:
    """Return the reason of a skip that CI does not accept."""
    if os.environ.get("CI", "").lower() not in {"1", "true"}:
        return None
    reason = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr).removeprefix("Skipped: ")
    return None if reason.startswith(ELSEWHERE) else reason


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    reason = _refused(report.longrepr) if report.skipped and not hasattr(report, "wasxfail") else None
    if reason is not None:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and CI=true: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    report = yield
    reason = _refused(report.longrepr) if report.skipped else None
    if reason is not None:
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid} was skipped, and CI=true: {reason}"
    return report
