"""Context compression: what stays of a long episode when its conversation outgrows a limit.

The task's own messages stay, the turns that tell how a check went, and the latest turns; a summary by the model
itself may stand for the rest. What remains is rendered anew and begins a segment of its own: the model samples
from exactly these tokens, and is trained against exactly these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from lehr.core.config import Config, Count
from lehr.core.task import Message, ToolSpec
from lehr.model.base import Renderer

SUMMARY_REQUEST = (
    "The conversation is getting long, and its older part will be removed. Write down what you have to "
    "remember of it to go on with the task: what you did, what came of it, what is left to do."
)
LEFT_OUT = "[{count} earlier turns were removed to make room.{summary}]"
WORTH = 0.75
"""The most of a prompt's length that may be left for compression to be worth its new prefix."""
MARGIN_TOKENS = 64
"""Kept free for the headers of messages and for a summary's request."""


class CompressionConfig(Config):
    """When a conversation is compressed, and what stays of it."""

    limit_tokens: int | None = Field(default=None, ge=64, lt=1 << 31)
    """Compress before a turn whose prompt would be longer. The default leaves room for one completion, and the
    summary, in the model's context."""
    keep_tail: Count = 4
    """Latest turns kept; fewer where they do not fit, but always the last one."""
    keep_checks: int = Field(default=4, ge=0, lt=1 << 31)
    """Latest of the older turns kept that tell how a check went."""
    summary_tokens: int = Field(default=0, ge=0, lt=1 << 31)
    """Above 0, the model sums up in at most so many tokens what is removed. It is trained on that as on any
    turn.
    """


@dataclass(frozen=True, slots=True)
class Exchange:
    """A turn of the model and what the environment answered. check: it tells how a check went."""

    said: str
    answered: tuple[Message, ...]
    check: bool = False

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turn as messages."""
        return (Message(role="assistant", content=self.said), *self.answered)


def limit_of(config: CompressionConfig, *, context_tokens: int, max_tokens: int) -> int:
    """Return the longest prompt that is not compressed."""
    room = context_tokens - max_tokens - config.summary_tokens - MARGIN_TOKENS
    return room if config.limit_tokens is None else min(config.limit_tokens, room)


def choose(
    head: Sequence[Message],
    tools: tuple[ToolSpec, ...],
    exchanges: Sequence[Exchange],
    config: CompressionConfig,
    renderer: Renderer,
    limit: int,
    before: int,
) -> tuple[int, ...] | None:
    """Return which exchanges to keep so that the prompt, summary included, fills half of ``limit`` at most, and
    all of it where only the last exchange is left; None where not even that fits, or where
    too little of the ``before`` tokens would go.

    Older checks go first, then the older part of the tail.
    """
    tail = list(range(max(0, len(exchanges) - config.keep_tail), len(exchanges)))
    older = [i for i in range(tail[0]) if exchanges[i].check] if tail else []
    kept = [*older[len(older) - min(len(older), config.keep_checks) :], *tail]
    while len(kept) >= 1:
        if len(kept) < len(exchanges):
            noted = "-" if config.summary_tokens else ""
            tokens = renderer.start(assemble(head, exchanges, kept, noted), tools)
            size = len(tokens) + config.summary_tokens
            if size <= limit // 2 or (len(kept) == 1 and size <= min(limit, before * WORTH)):
                return tuple(kept)
        kept.pop(0)
    return None


def assemble(
    head: Sequence[Message], exchanges: Sequence[Exchange], kept: Sequence[int], summary: str
) -> tuple[Message, ...]:
    """Return the messages of the compressed conversation. That something is missing, and the summary, is said
    at the end of the task's last message, so that roles alternate as they did.
    """
    count = len(exchanges) - len(kept)
    note = LEFT_OUT.format(count=count, summary=f" What you noted of them:\n{summary}\n" if summary else "")
    last = head[-1]
    if last.role == "user":
        before = (*head[:-1], Message(role="user", content=f"{last.content}\n\n{note}"))
    else:
        before = (*head, Message(role="user", content=note))
    return (*before, *(message for i in kept for message in exchanges[i].messages))
