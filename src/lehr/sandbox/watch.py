"""What a program has used so far, and ending it when a limit that the host keeps is passed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lehr.sandbox.base import Connection, ExecUsage
from lehr.sandbox.launch import Process
from lehr.sandbox.streams import Capture

if TYPE_CHECKING:
    from lehr.sandbox.box import RunnerBox

TICK_S, LONGEST_TICK_S, SLOWER = 0.01, 0.05, 1.5
"""How soon a running program is looked at first, how long at most between two looks, and the growth."""
PROMPT_S = 0.01
"""CPU time after which a program weighs less than one that has just begun."""
GRACE_S = 0.35
PATIENT_S = 3.0
OUTPUT_FACTOR = 64
REFUSED_FORKS = 64


class Meter:
    """Differences of a box's counters over one exec."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._group = group = process.group
        self._cpu_s = group.cpu_s() if group else None
        self._refused = group.refused_pids() if group else 0
        self._ooms = group.oom_kills() if group else 0
        self._bytes = group.memory_now() if group else 0
        if group:
            group.reset_peak()

    @property
    def limited(self) -> bool:
        """Whether a cgroup holds the limits."""
        return self._group is not None

    def cpu_s(self) -> float | None:
        """CPU seconds since the start, or None where only the runner knows."""
        now = self._group.cpu_s() if self._group else None
        return None if now is None or self._cpu_s is None else now - self._cpu_s

    def slow_down(self) -> None:
        """The program has computed for a while: it goes after what has just begun, a crowd on other cores."""
        if self._group:
            self._group.hurry(False)
            self._group.confine()

    def refused_pids(self) -> int:
        """Forks refused since the start."""
        return self._group.refused_pids() - self._refused if self._group else 0

    def oom_kills(self) -> int:
        """Processes ended for want of memory since the start."""
        return self._group.oom_kills() - self._ooms if self._group else 0

    def denied(self) -> tuple[str, ...]:
        """System calls refused that were not told before, by name."""
        return self._process.refusals.take() if self._process.refusals else ()

    def connections(self) -> tuple[Connection, ...]:
        """Attempts to reach hosts that were not told before."""
        return self._process.egress.take() if self._process.egress else ()

    def lost_to_memory(self) -> bool:
        """Whether want of memory has ended a part of the box itself rather than a program."""
        return False

    def usage(self, header: Mapping[str, Any], wall_s: float) -> ExecUsage:
        """Return what the exec used, from the cgroup and from the runner's report."""
        cpu_s = self.cpu_s()
        user_s, system_s = header.get("user_s", 0.0), header.get("system_s", 0.0)
        peak = self._group.memory_peak() - self._bytes if self._group else 0
        return ExecUsage(
            wall_s=wall_s,
            cpu_s=user_s + system_s if cpu_s is None else cpu_s,
            user_s=user_s,
            system_s=system_s,
            read_bytes=header.get("read_bytes", 0),
            written_bytes=header.get("written_bytes", 0),
            peak_bytes=max(peak, header.get("peak_bytes", 0) if not self._group else 0),
            peak_pids=max(header.get("peak_pids", 0), self._group.pids_peak() if self._group else 0),
        )


class Watch:
    """Ends one exec when a limit that the host keeps is passed. The first reason stands."""

    def __init__(self, box: RunnerBox, number: int, meter: Meter, wall_s: float) -> None:
        self._box = box
        self._number = number
        self._meter = meter
        self._wall_s = wall_s
        self._captures: list[Capture] = []
        self._loop = asyncio.get_running_loop()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._pause_s = TICK_S
        self.reason = ""

    def start(self, captures: list[Capture]) -> None:
        """Begin to count."""
        self._captures = captures
        self._timers["wall"] = self._loop.call_later(self._wall_s, self.end, "wall")
        self._timers["tick"] = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        limits = self._box.spec.limits
        cpu_s = self._meter.cpu_s()
        if cpu_s is not None and cpu_s > PROMPT_S:
            self._meter.slow_down()
        if cpu_s is not None and cpu_s > limits.cpu_s:
            self.end("cpu")
        elif any(c.total > OUTPUT_FACTOR * limits.output_bytes for c in self._captures):
            self.end("output")
        elif self._meter.refused_pids() > REFUSED_FORKS:
            self.end("pids")
        elif self._meter.lost_to_memory():
            self.end("oom")
        else:
            self._pause_s = min(SLOWER * self._pause_s, LONGEST_TICK_S)
            self._timers["tick"] = self._loop.call_later(self._pause_s, self._tick)

    def end(self, reason: str) -> None:
        """End the exec; the box with it if it does not obey in time."""
        if not self.reason:
            self.stop()
            self.reason = reason
            self._box.interrupt(self._number)
            self._timers["grace"] = self._loop.call_later(
                GRACE_S if reason in ("wall", "cpu", "oom") else PATIENT_S, self._box.give_up
            )

    def stop(self) -> None:
        """The exec is over."""
        for timer in self._timers.values():
            timer.cancel()
