from __future__ import annotations

import io

import pytest
from rich.console import Console

from lehr.app.meter import Meter, duration, pace
from lehr.app.progress import LiveProgress, PlainProgress
from lehr.core.clock import VirtualClock


def test_meter_tells_rate_and_time_left() -> None:
    clock = VirtualClock()
    meter = Meter(100, clock)
    assert meter.rate is None and meter.left_s is None
    clock.advance(10)
    meter.update(20)
    assert meter.rate == pytest.approx(2.0)
    assert meter.left_s == pytest.approx(40.0)
    clock.advance(5)
    assert meter.left_s == pytest.approx(35.0)
    assert meter.rate == pytest.approx(2.0)


def test_meter_does_not_count_work_that_was_done_before() -> None:
    clock = VirtualClock()
    meter = Meter(100, clock)
    meter.update(80)
    clock.advance(10)
    meter.update(90)
    assert meter.rate == pytest.approx(1.0)
    assert meter.left_s == pytest.approx(10.0)


def test_durations_and_paces_read_well() -> None:
    assert [duration(s) for s in (0.4, 59, 61, 3725)] == ["0 s", "59 s", "1:01", "1:02:05"]
    assert pace(4.25, "tasks") == "4.2 tasks/s"
    assert pace(0.05, "steps") == "20 s per step"


def _lines(clock: VirtualClock) -> tuple[PlainProgress, io.StringIO]:
    out = io.StringIO()
    return PlainProgress(Console(file=out, width=200), clock), out


def test_plain_lines_come_at_borders_and_at_most_every_five_seconds() -> None:
    clock = VirtualClock()
    progress, out = _lines(clock)
    progress.stage("measure base", 300, "tasks")
    for done in range(1, 101):
        clock.advance(0.125)
        progress.advance(done, 300, passed="10%")
    progress.finish("measure base")
    lines = out.getvalue().splitlines()
    assert len(lines) == 5
    assert "8.0 tasks/s" in lines[1] and "left" in lines[1] and "passed 10%" in lines[1]
    assert lines[-1].endswith("measure base: done in 12 s")


def test_plain_lines_show_domains_apart_from_other_facts() -> None:
    clock = VirtualClock()
    progress, out = _lines(clock)
    progress.stage("rl", 16, "steps")
    clock.advance(20)
    progress.advance(1, 16, **{"staleness": 0.5, "code/functions": "40%"})
    assert "staleness 0.5  code/functions 40%" in out.getvalue()


def test_live_display_leaves_a_line_per_stage_and_shows_time_left() -> None:
    clock = VirtualClock()
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=True, color_system=None)
    progress = LiveProgress(console, clock)
    progress.stage("measure base", 300, "tasks")
    console.print(progress.render())
    assert "measure base" in out.getvalue() and "0/300 tasks" in out.getvalue()
    clock.advance(10)
    progress.advance(100, 300, passed="12%")
    console.print(progress.render())
    assert "20 s left" in out.getvalue()
    progress.stage("sft", 8, "steps")
    progress.finish("sft", seconds=3)
    text = out.getvalue()
    assert "✓ measure base" in text and "✓ sft" in text
    progress.finish("whole", seconds=13)
    assert "✓ whole" in out.getvalue()


def test_a_stage_that_counts_nothing_shows_no_count() -> None:
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=True, color_system=None)
    progress = LiveProgress(console, VirtualClock())
    progress.stage("start", None, "roles")
    console.print(progress.render())
    progress.finish("start", seconds=2)
    assert "✓ start" in out.getvalue() and "0 roles" not in out.getvalue()
