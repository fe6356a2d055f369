"""A model of one's own that is asked in messages, as one behind an API is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from lehr.core.completer import Answer, AnswerError
from lehr.core.task import Message
from lehr.core.trace import Sampling, Usage
from lehr.engine.base import Engine
from lehr.model.base import Renderer


class EngineCompleter:
    """Implements ``core.completer.Completer`` on an engine, which its owner closes.

    context_tokens: the longest conversation, answer included.
    """

    def __init__(
        self, engine: Engine, renderer: Renderer, *, context_tokens: int, timeout_s: float = 600.0
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._context_tokens = context_tokens
        self._timeout_s = timeout_s

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, *, timeout_s: float | None = None
    ) -> Answer:
        """Return the model's next turn; see ``core.completer.Completer``."""
        tokens = self._renderer.start(tuple(messages))
        room = self._context_tokens - len(tokens)
        if room <= 0:
            raise AnswerError(
                f"a conversation of {len(tokens)} tokens leaves no room for an answer",
                expected=f"fewer than {self._context_tokens}",
            )
        begun = time.monotonic()
        made = await self._engine.generate(
            tokens,
            replace(sampling, max_tokens=min(sampling.max_tokens, room)),
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
        )
        return Answer(
            self._renderer.text([int(t) for t in made.tokens]),
            "length" if made.stop == "length" else "stop",
            Usage(len(tokens), made.cached_tokens, len(made.tokens)),
            seconds=time.monotonic() - begun,
        )

    async def close(self) -> None:
        """Nothing: the engine is its owner's."""
