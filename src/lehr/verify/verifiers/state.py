"""``match_state``: compares the files that an episode left behind with those that the task asks for.

``gold.data`` holds ``start`` and ``want``: the files before and after, ``{path: text}``; a path that ends in
``/`` is a folder. What the model said does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping

from lehr.core.episode import Evidence
from lehr.core.task import Gold, Task
from lehr.sandbox.base import Boxes
from lehr.verify.base import NoScore, Score

UNKNOWN = "\0unknown"
"""The content of what could not be taken: no file that a task asks for has it."""


async def match_state(task: Task, evidence: Evidence, gold: Gold, boxes: Boxes) -> Score | NoScore:
    """Return the share of wanted changes that were made, over wanted changes plus damage.

    What was already true before earns nothing. Damage is every file that should not be there and every
    file that should have stayed as it was and did not. White space at the end of a file is ignored. What is
    there but could not be taken (a link, a closed file or all that lies in a closed folder) is neither gone nor
    as it should be; if nothing could be collected, nothing is earned.
    """
    del boxes
    start = {path: _settled(text) for path, text in gold.data.get("start", {}).items()}
    want = {path: _settled(text) for path, text in gold.data.get("want", {}).items()}
    got = {path: _settled(data.decode(errors="replace")) for path, data in evidence.files.items()}
    closed = tuple(path for path in evidence.unread if path.endswith("/"))
    hidden = [path for path in (*start, *want) if path.startswith(closed)]
    got.update(dict.fromkeys((*evidence.unread, *hidden), UNKNOWN))
    changes = [path for path in {**start, **want} if start.get(path) != want.get(path)]
    if not changes:
        return NoScore("verifier_crash", f"{task.id} asks for no change")
    if evidence.refused:
        return Score(0.0, f"what was left behind cannot be collected: {evidence.refused}")
    made = [path for path in changes if got.get(path) == want.get(path)]
    kept = [path for path in want if path not in changes]
    damage = [path for path in kept if got.get(path) != want[path]]
    damage += [
        path for path in got if path not in want and path not in start and not _implied(path, start, want)
    ]
    missing = sorted(set(changes) - set(made))
    detail = f"{len(made)} of {len(changes)} changes made"
    detail += f"; not {', '.join(missing)}" if missing else ""
    detail += f"; damaged {', '.join(sorted(damage)[:5])}" if damage else ""
    return Score(len(made) / (len(changes) + len(damage)), detail)


def _settled(text: str) -> str:
    return text.rstrip()


def _implied(path: str, start: Mapping[str, str], want: Mapping[str, str]) -> bool:
    return path.endswith("/") and any(known.startswith(path) for known in (*start, *want))
