"""An environment says how an episode runs, a verifier what it was worth; they meet in Evidence only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lehr.core.errors import Failure
from lehr.core.task import Message


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion as the environment sees it: text, and whether it was cut by the token limit."""

    text: str
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's answer to a turn. ``messages`` are appended before the next completion.

    check: it tells how a check went, such as a test run; it is kept when older turns have to make room.
    """

    messages: tuple[Message, ...] = ()
    done: bool = False
    check: bool = False


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that a verifier may look at.

    answer: text of the last completion. files: artefacts by path relative to the working folder. unread: what
    is there but was not taken, by path, with the reason: a link, a file that may not be opened. refused: why
    nothing was collected, if what the episode left behind was too much. Both are the candidate's doing.
    turns: completions that were made. failure: what broke the episode, if it broke; then no verifier is
    asked and the reward is Invalid.
    """

    task_id: str
    answer: str
    files: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    turns: int = 1
    failure: Failure | None = None
    unread: Mapping[str, str] = field(default_factory=dict[str, str])
    refused: str = ""
