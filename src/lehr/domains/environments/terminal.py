"""Several turns with a shell in a leased box.

Each turn of the model holds one fenced ``sh`` block, which runs in a persistent shell; what it printed comes
back as a ``tool`` message. A turn without a block, such as ``DONE``, ends the episode. The final files of the
working folder are the evidence, or those of them that the task lists as artefacts. What the task sets up is
there before the first turn.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from lehr.core.episode import Evidence, Observation, Turn
from lehr.core.task import Message, Task
from lehr.domains.base import Episode
from lehr.sandbox.base import Box, Boxes, ExecResult, Shell, Unread
from lehr.sandbox.errors import Absent, Refused, SandboxError
from lehr.sandbox.taskbox import acquire_for

COMMAND_S = 5.0
SHOWN_CHARACTERS = 300
ARTIFACT_BYTES = 8 << 20
_CHECK = re.compile(r"\b(pytest|unittest|doctest|ctest|(make|npm|cargo|go) (test|check)|diff|cmp|sha\d+sum)\b")
"""Commands that check something. What they print, and any failure, tells how a check went."""
_FENCE = re.compile(r"```(?:sh|bash|shell)?[ \t]*\n(.*?)\n?```", re.DOTALL)


class TerminalEnvironment:
    """Runs every turn's block in one shell of one box per episode.

    The box is leased when the first block is to run, not while the model is still writing it: boxes are
    scarcer than episodes.
    """

    async def open(self, task: Task, boxes: Boxes) -> Episode:
        """Start an episode."""
        return _TerminalEpisode(task, boxes)


class Found(NamedTuple):
    """What an episode left behind; see :class:`lehr.core.episode.Evidence`."""

    files: dict[str, bytes]
    unread: dict[str, str]
    refused: str = ""


class _TerminalEpisode:
    def __init__(self, task: Task, boxes: Boxes) -> None:
        self._task = task
        self._boxes = boxes
        self._box: Box | None = None
        self._shell: Shell | None = None
        self._answer = ""
        self._turns = 0
        self._evidence: Evidence | None = None
        self._leased = False

    async def step(self, turn: Turn) -> Observation:
        self._answer = turn.text
        self._turns += 1
        found = _FENCE.search(turn.text)
        if found is None:
            return Observation(done=True)
        result = await self._run(found[1].replace("\0", ""))
        checked = result.verdict != "ok" or _CHECK.search(found[1]) is not None
        return Observation((Message(role="tool", content=_shown(result)),), check=checked)

    async def _run(self, command: str) -> ExecResult:
        """Run in the shell; where an earlier command ended it, in a new one."""
        box = self._box or await self._lease()
        if self._shell is not None:
            result = await self._shell.run(command, timeout_s=COMMAND_S)
            if result.verdict != "broken":
                return result
        self._shell = await box.shell()
        result = await self._shell.run(command, timeout_s=COMMAND_S)
        if result.verdict == "broken":
            raise SandboxError(f"the box of {self._task.id} broke: {result.detail}")
        return result

    async def close(self) -> Evidence:
        if self._evidence is None:
            if not self._leased and self._task.setup:
                await self._lease()
            box, self._box, self._shell = self._box, None, None
            if box is None:
                found = Found({path: text.encode() for path, text in self._task.files.items()}, {})
            else:
                try:
                    found = await _collect(box, self._task.artifacts)
                finally:
                    await self._boxes.release(box)
            self._evidence = Evidence(
                self._task.id,
                self._answer,
                found.files,
                self._turns,
                unread=found.unread,
                refused=found.refused,
            )
        return self._evidence

    async def _lease(self) -> Box:
        """Lease the box, with the task's files in it and its set-up done. Raises the pool's errors."""
        self._leased = True
        self._box = await acquire_for(self._boxes, self._task, timeout_s=self._task.timeout_s)
        return self._box


async def _collect(box: Box, artifacts: tuple[str, ...]) -> Found:
    """Return the artefacts that the task lists, as far as they are there, else all files, and folders as
    ``name/``. What cannot be taken is told apart from what is not there.
    """
    files: dict[str, bytes] = {}
    unread: dict[str, str] = {}
    for path in artifacts:
        try:
            files[path] = await box.read(path, limit_bytes=ARTIFACT_BYTES)
        except Absent:
            continue
        except Refused as error:
            unread[path] = str(error)
    if artifacts:
        return Found(files, unread)
    try:
        tree = await box.tree()
    except Refused as error:
        return Found({}, {}, str(error))
    for path, entry in tree.items():
        if isinstance(entry, Unread):
            unread[f"{path}/" if entry.kind == "folder" else path] = entry.kind
        else:
            files[path if entry is not None else f"{path}/"] = entry or b""
    return Found(files, unread)


def _shown(result: ExecResult) -> str:
    text = (result.stdout + result.stderr).decode(errors="replace").strip()
    if len(text) > SHOWN_CHARACTERS:
        text = f"{text[: SHOWN_CHARACTERS // 2]}\n...\n{text[-SHOWN_CHARACTERS // 2 :]}"
    if result.verdict == "ok":
        return text or "ok"
    code = f"exit {result.exit_code}" if result.exit_code is not None else result.verdict
    return f"{text}\n{code}" if text else code
