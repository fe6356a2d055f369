"""Chat to tokens, through the model's own template, by extension only.

The template is rendered as text; its special tokens become single ids, while a message that merely looks
like one stays plain text. A later turn renders only what follows the completion, so that the ids that were
sampled are kept as they are, whether or not the tokenizer would split the same text so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, Literal, NoReturn, Protocol

from lehr.core.errors import ConfigError
from lehr.core.task import Message, ToolSpec

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'"
    " + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of a tokenizer that brings none."""

CallForm = Literal["tagged", "bare"]
"""How a model writes that it calls a tool: JSON between ``<tool_call>`` and ``</tool_call>``, or JSON alone
with ``parameters`` (Llama)."""

_HOLE = "\ue000{}\ue001"
_HOLES = re.compile("\ue000(\\d+|answer)\ue001")


class TemplateTokenizer(Protocol):
    """A tokenizer with named special tokens and perhaps a chat template."""

    vocab_size: int
    eos_id: int
    specials: dict[str, int]
    template: str | None

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text, special tokens left out."""
        ...


class ChatRenderer:
    """Implements ``model.base.Renderer`` for any tokenizer and chat template.

    stop_ids: the end-of-sequence token and every other special token that ends a turn or a text.
    """

    def __init__(self, tokenizer: TemplateTokenizer) -> None:
        self._tokenizer = tokenizer
        self._source = tokenizer.template or CHATML
        endings = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")
        ids = [tokenizer.eos_id, *(tokenizer.specials[e] for e in endings if e in tokenizer.specials)]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(ids))
        names = sorted(tokenizer.specials, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    @property
    def call_form(self) -> CallForm:
        """How the template has the model call tools; the tagged form where it does not say."""
        bare = "<tool_call>" not in self._source and ("python_tag" in self._source or "ipython" in self._source)
        return "bare" if bare else "tagged"

    def start(self, messages: tuple[Message, ...], tools: tuple[ToolSpec, ...] = ()) -> list[int]:
        """Return the ids of the chat, ending with the header of the assistant's turn."""
        shown = [m.model_dump() for m in messages]
        specs: list[dict[str, Any]] | None = [_openai(t) for t in tools] or None
        if specs and "tools" not in self._source:
            shown, specs = _describe(shown, specs), None
        holes: list[str] = []
        return self._ids(self._render(self._plain(shown, holes), specs), holes)

    def extend(self, tokens: list[int], messages: tuple[Message, ...]) -> list[int]:
        """Return ``tokens``, which end in a completion, plus the end of that turn, ``messages`` and the header
        of the next assistant turn. The given tokens are always a prefix of the result.
        """
        holes: list[str] = []
        after = self._plain([m.model_dump() for m in messages], holes)
        ids = self._ids(self._after_answer(after, prompt=True), holes)
        return [*tokens, *(ids[1:] if tokens and ids and tokens[-1] == ids[0] else ids)]

    def complete(self, text: str) -> list[int]:
        """Return the ids of an assistant turn that says ``text``, its end-of-turn token included."""
        return [*self._tokenizer.encode(text), self._end]

    def text(self, tokens: list[int]) -> str:
        """Return what a completion says, without its end-of-turn token."""
        ids = list(tokens)
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self._tokenizer.decode(ids)

    @cached_property
    def _end(self) -> int:
        ids = self._ids(self._after_answer([], prompt=False), [])
        return ids[0] if ids and ids[0] in self.stop_ids else self._tokenizer.eos_id

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        place = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        place.filters["tojson"] = lambda value, **kw: json.dumps(
            value, ensure_ascii=False, indent=kw.get("indent")
        )
        place.globals["raise_exception"] = refuse
        place.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            return place.from_string(self._source)
        except TemplateError as error:
            raise ConfigError(f"the chat template cannot be compiled: {error}") from error

    def _render(self, messages: list[dict[str, Any]], tools: Any = None, *, prompt: bool = True) -> str:
        from jinja2 import TemplateError

        names = {v: k for k, v in self._tokenizer.specials.items()}
        bos = (
            "<s>"
            if "<s>" in self._tokenizer.specials
            else self._tokenizer.specials.get("<|begin_of_text|>", "")
        )
        bos_text = names.get(bos, "") if isinstance(bos, int) else bos
        eos_text = names.get(self._tokenizer.eos_id, "")
        try:
            return self._compiled.render(
                messages=messages,
                tools=tools,
                add_generation_prompt=prompt,
                bos_token=bos_text,
                eos_token=eos_text,
            )
        except TemplateError as error:
            roles = ", ".join(m["role"] for m in messages)
            raise ConfigError(f"the chat template refuses the roles {roles}: {error}") from error

    def _after_answer(self, messages: list[dict[str, Any]], *, prompt: bool) -> str:
        hole = _HOLE.format("answer")
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": hole}]
        text = self._render([*before, *messages], prompt=prompt)
        _, found, rest = text.partition(hole)
        if not found:
            raise ConfigError("the chat template does not show what the assistant said")
        return rest

    def _plain(self, messages: list[dict[str, Any]], holes: list[str]) -> list[dict[str, Any]]:
        """Put a placeholder wherever a message says what only the template may say."""

        def hide(found: re.Match[str]) -> str:
            holes.append(found[0])
            return _HOLE.format(len(holes) - 1)

        pattern = re.compile(self._special.pattern + "|[\ue000\ue001]") if self._special else None
        if pattern is None:
            return messages
        return [{**m, "content": pattern.sub(hide, m["content"])} for m in messages]

    def _ids(self, text: str, holes: list[str]) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(self._special.split(text) if self._special else [text]):
            if i % 2:
                ids.append(self._tokenizer.specials[part])
            elif part:
                ids.extend(self._tokenizer.encode(_HOLES.sub(lambda m: holes[int(m[1])], part)))
        return ids


def _openai(tool: ToolSpec) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}


def _describe(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add the tools to the system message, for a template that cannot show them."""
    lines = "\n".join(json.dumps(t["function"], ensure_ascii=False) for t in tools)
    block = f"You can use these tools:\n{lines}"
    first: Mapping[str, Any] = messages[0] if messages else {}
    if first.get("role") == "system":
        return [{"role": "system", "content": f"{first['content']}\n\n{block}"}, *messages[1:]]
    return [{"role": "system", "content": block}, *messages]
