"""``run_unit_tests``: calls the candidate's function in a fresh box and compares its results outside.

``gold.data`` holds ``entry`` (name of the function) and ``tests``, a list of ``{"args": [...], "want": v}``.
Only the arguments enter the box, which is a bare one, or, where the task names an image or set-up steps, one of
its image in the state after its set-up. The score is the fraction of all tests whose result came back and is
equal to the expected value by exact type; a test without a result counts as failed.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lehr.core.episode import Evidence
from lehr.core.task import Gold, Task
from lehr.sandbox.base import Boxes, ExecResult, Spec
from lehr.sandbox.taskbox import lease_for
from lehr.verify import inside_box
from lehr.verify.base import NoScore, Score
from lehr.verify.values import same

SOLUTION = "solution.py"
SOURCE_BYTES = 64 << 10
CALL_CPU_S = 1
CALL_WALL_S = 4.0
EXEC_WALL_S = 10.0
BOX_S = 300.0
OWN_PYTHON = ("python3", "-I", "-B")
"""In an image of the task's own, with what it has installed."""
PROBE = "def probe():\n    return 1\n"


async def run_unit_tests(task: Task, evidence: Evidence, gold: Gold, boxes: Boxes) -> Score | NoScore:
    """Return the fraction of hidden tests passed."""
    tests: Sequence[Mapping[str, Any]] = gold.data.get("tests", ())
    entry = gold.data.get("entry")
    if not tests or not isinstance(entry, str):
        return NoScore("verifier_crash", f"{task.id} has no hidden tests")
    source = _source(evidence)
    if source is None:
        return Score(0.0, f"no readable {SOLUTION}")
    results = await _results(task, source, entry, [test["args"] for test in tests], boxes)
    if isinstance(results, NoScore):
        return results
    passed = [number in results and _equal(results[number], test["want"]) for number, test in enumerate(tests)]
    failed = [str(number) for number, ok in enumerate(passed) if not ok]
    detail = f"{sum(passed)} of {len(tests)} tests passed" + (
        f"; failed: {', '.join(failed)}" if failed else ""
    )
    return Score(sum(passed) / len(tests), detail)


def _source(evidence: Evidence) -> str | None:
    data = evidence.files.get(SOLUTION)
    if data is None or len(data) > SOURCE_BYTES:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _equal(encoded: Any, want: Any) -> bool:
    try:
        return same(inside_box.decode(encoded), want)
    except (ValueError, OverflowError, RecursionError):
        return False


async def _results(
    task: Task, source: str, entry: str, calls: Sequence[Any], boxes: Boxes
) -> Mapping[int, Any] | NoScore:
    """Return the encoded results by call number. A box that breaks is tried once more; if it breaks again
    under the candidate although a harmless program runs well, the candidate broke it and has no results.
    """
    result, found = await _run(task, source, entry, calls, boxes)
    if result.verdict == "broken":
        result, found = await _run(task, source, entry, calls, boxes)
    if found is None:
        return NoScore("sandbox", f"the test runner did not start: {result.verdict} {_tail(result)}")
    if result.verdict != "broken":
        return found
    probe, answered = await _run(task, PROBE, "probe", [[]], boxes)
    if answered and probe.verdict == "ok":
        return {}
    return NoScore("sandbox", f"the box broke: {probe.detail or probe.verdict}")


async def _run(
    task: Task, source: str, entry: str, calls: Sequence[Any], boxes: Boxes
) -> tuple[ExecResult, dict[int, Any] | None]:
    """Run once; None instead of results if the runner never said that it is ready."""
    nonce = secrets.token_hex(16)
    own = task.image != "host" or bool(task.setup)
    request = {
        "nonce": nonce,
        "source": source,
        "entry": entry,
        "calls": [[inside_box.encode(value) for value in arguments] for arguments in calls],
        "call_s": CALL_CPU_S,
        "wall_s": CALL_WALL_S,
        "surroundings": own,
    }
    leased = lease_for(boxes, task, timeout_s=BOX_S) if own else boxes.lease(Spec())
    async with leased as box:
        result = await box.exec(
            [*(OWN_PYTHON if own else (interpreter(), "-I", "-S", "-B")), "-c", _program()],
            stdin=json.dumps(request).encode(),
            env={},
            timeout_s=EXEC_WALL_S,
        )
    ready, found = False, dict[int, Any]()
    for line in result.stdout.split(b"\n"):
        try:
            said, what, *rest = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            continue
        if said != nonce:
            continue
        if what == "ready":
            ready = True
        elif type(what) is int and rest[:1] == ["value"] and len(rest) == 2:
            found.setdefault(what, rest[1])
    return result, found if ready else None


@cache
def _program() -> str:
    return Path(inside_box.__file__).read_text()


@cache
def interpreter() -> str:
    """Return the absolute path of the Python that the host image offers."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3"):
        if Path(path).exists():
            return path
    return "/usr/bin/python3"


def _tail(result: ExecResult) -> str:
    return (result.detail or result.stderr[-200:].decode(errors="replace")).strip()
