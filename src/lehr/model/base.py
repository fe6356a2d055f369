"""What the engine and the trainer need of a model. The one decoder lives in ``decoder``.

Shape letters: T packed tokens, D hidden size, H query heads, K key-value heads, E head size, V vocabulary,
N positions whose logits are wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from lehr.core.task import Message, ToolSpec

if TYPE_CHECKING:
    from torch import Tensor


class Attend(Protocol):
    """How positions see each other: the only thing in which sampling and training differ.

    The decoder calls it once per layer with rotary embedding already applied.
    """

    def __call__(self, layer: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """Return the attention output, ``[T, H, E]``."""
        ...


class Tokenizer(Protocol):
    """Text to token ids and back. Special tokens are only ever produced by the renderer."""

    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text``; text that looks like a special token is encoded as plain text."""
        ...

    def decode(self, ids: list[int]) -> str:
        """Return the text, special tokens left out; incomplete bytes become U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the raw bytes of one token, b"" for a special token."""
        ...


class Renderer(Protocol):
    """Chat to tokens, by extension only: what was sampled is never tokenised again."""

    stop_ids: tuple[int, ...]
    """Tokens that end a completion."""

    def start(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...] = ()) -> list[int]:
        """Return the ids of the chat, ending with the header of the assistant's turn."""
        ...

    def extend(self, tokens: list[int], messages: tuple[Message, ...]) -> list[int]:
        """Return ``tokens`` (which end in a completion) plus the rest of that turn, ``messages`` and the
        header of the next assistant turn. The given tokens are a prefix of the result, always.
        """
        ...

    def complete(self, text: str) -> list[int]:
        """Return the ids of an assistant turn that says ``text``, its end-of-turn token included."""
        ...

    def text(self, tokens: list[int]) -> str:
        """Return what a completion says, without its end-of-turn token."""
        ...
