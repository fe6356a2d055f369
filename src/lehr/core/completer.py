"""Models that are asked in messages and answer in text: teachers, judges, and models that are only measured.

    LehrError
    └── AnswerError            (RuntimeError) a request that got no usable answer
        └── NoAccess                          nor would any other: the key, the model, the quota

An answer is not a ``core.trace.Completion``: nobody knows which tokens were sent and sampled, with which
probabilities. It can be judged, and imitated, but not trained on by policy gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from lehr.core.errors import LehrError
from lehr.core.task import Message
from lehr.core.trace import Sampling, Usage

AnswerStop = Literal["stop", "length", "filtered"]


class AnswerError(LehrError, RuntimeError):
    """A request that got no usable answer. ``status`` is the last HTTP status, where there was one."""

    code = "answer"
    status: int | None = None

    def __init__(self, what: str, *, expected: str = "", hint: str = "", status: int | None = None) -> None:
        super().__init__(what, expected=expected, hint=hint)
        self.status = status


class NoAccess(AnswerError):
    """The model cannot be used at all: a wrong key, an unknown model, a quota that is spent."""

    code = "no_access"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a model said.

    stop: it came to an end or to a stop string, was cut by the token limit, or was withheld by a filter.
    usage: as the server counts; zeros where it does not. cost: in the currency of the prices, if there are any.
    seconds: from the call to the answer. attempts: requests that it took. model: as the server names it.
    """

    text: str
    stop: AnswerStop
    usage: Usage = field(default_factory=Usage)
    cost: float | None = None
    seconds: float = 0.0
    attempts: int = 1
    model: str = ""


class Completer(Protocol):
    """Answers conversations. All methods are safe to call concurrently."""

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, *, timeout_s: float | None = None
    ) -> Answer:
        """Return the model's next turn after ``messages``.

        timeout_s: for everything, queues and retries included; None is the completer's own limit. Raises
        :class:`NoAccess`, another :class:`AnswerError`, or ``DeadlineExceeded``. A cancelled caller ends the
        request.
        """
        ...

    async def close(self) -> None:
        """End what runs. Idempotent."""
        ...
