"""One question, one answer, no box."""

from __future__ import annotations

import re

from lehr.core.episode import Evidence, Observation, Turn
from lehr.core.task import Task
from lehr.domains.base import Episode
from lehr.sandbox.base import Boxes

_FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*?)\n?```", re.DOTALL)


class AnswerEnvironment:
    """Single turn. Where the task names an artefact, the first fenced block of the answer becomes it."""

    async def open(self, task: Task, boxes: Boxes) -> Episode:
        """Start an episode; needs no box."""
        del boxes
        return _AnswerEpisode(task)


class _AnswerEpisode:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._answer = ""
        self._turns = 0

    async def step(self, turn: Turn) -> Observation:
        self._answer = turn.text
        self._turns += 1
        return Observation(done=True)

    async def close(self) -> Evidence:
        files: dict[str, bytes] = {}
        block = fenced_block(self._answer)
        if self._task.artifacts and block is not None:
            files[self._task.artifacts[0]] = block.encode(errors="replace")
        return Evidence(self._task.id, self._answer, files, self._turns)


def fenced_block(text: str) -> str | None:
    """Return the content of the first closed fence, or the text itself where it is bare code."""
    found = _FENCE.search(text)
    if found:
        return found[1] + "\n"
    return text if text.startswith(("def ", "import ", "from ")) and "```" not in text else None
