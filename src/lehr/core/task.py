"""A task: what the model is asked, in which surroundings, and by which terms it is judged.

The gold answer is not part of a task. A domain hands out a :class:`Problem`, whose ``task`` goes to the
rollout and whose ``gold`` goes to the verifier alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

_FROZEN = ConfigDict(frozen=True, extra="forbid")
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*$", re.IGNORECASE)
_SCALE = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SHORTHAND = re.compile(r"^\s*([\w./-]+)\s*\{\s*weight\s*:\s*([-+.\deE]+)\s*\}\s*$")

Split = Literal["train", "validation", "heldout"]


def parse_size(text: str | int) -> int:
    """Return bytes for ``8Gi``, ``512M``, ``20 GiB`` or a plain number (powers of 1024 throughout)."""
    if isinstance(text, int):
        return text
    found = _SIZE.match(text)
    if not found:
        raise ValueError(f"cannot read the size {text!r}; write it like 512M or 8Gi")
    return int(float(found[1]) * _SCALE[found[2].upper()])


def _term(text: str) -> dict[str, Any]:
    found = _SHORTHAND.match(text)
    return {"verifier": found[1], "weight": float(found[2])} if found else {"verifier": text.strip()}


class Message(BaseModel):
    """One chat message."""

    model_config = _FROZEN
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class ToolSpec(BaseModel):
    """A tool as the model is shown it; ``parameters`` is a JSON Schema."""

    model_config = _FROZEN
    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict[str, Any])


class Resources(BaseModel):
    """What a box may use. Sizes accept ``8Gi``-style text."""

    model_config = _FROZEN
    cpu: float = Field(default=1.0, gt=0)
    memory_bytes: int = Field(default=512 << 20, gt=0, validation_alias="mem")
    disk_bytes: int = Field(default=64 << 20, gt=0, validation_alias="disk")

    @model_validator(mode="before")
    @classmethod
    def _aliases(cls, raw: object) -> object:
        if not isinstance(raw, Mapping):
            return raw
        named = {str(k): v for k, v in cast("Mapping[Any, Any]", raw).items()}
        for name, alias in (("memory_bytes", "mem"), ("disk_bytes", "disk")):
            if name in named:
                named[alias] = named.pop(name)
            if alias in named:
                named[alias] = parse_size(named[alias])
        return named


class RewardTerm(BaseModel):
    """One term of a reward: a verifier by name, its weight, and whether failing it voids the rest.

    Accepts ``name``, ``name { weight: 1.0 }`` and ``{name: {weight: 1.0}}``.
    """

    model_config = _FROZEN
    verifier: str
    weight: float = Field(default=1.0, gt=0)
    gate: bool = False

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, raw: object) -> object:
        if isinstance(raw, str):
            return _term(raw)
        if isinstance(raw, Mapping) and len(cast("Mapping[Any, Any]", raw)) == 1 and "verifier" not in raw:
            ((name, value),) = cast("Mapping[Any, Any]", raw).items()
            if value is None:  # plain YAML reads `- name { weight: 1.0 }` as {"name { weight": "1.0 }"}
                return {"verifier": str(name)}
            if isinstance(value, Mapping):
                return {"verifier": str(name), **cast("Mapping[str, Any]", value)}
            return _term(f"{name}: {value}")
        return cast(object, raw)


class Task(BaseModel):
    """What the model is asked. Serialisable, hashable by ``id``, free of the gold answer.

    id: ``domain@digest/split/index``; the same id always names the same task.
    files: placed in the working folder of the episode's box before the first turn.
    artifacts: paths, relative to the working folder, that the verifier is given.
    allow_hosts: what its boxes may reach, as :class:`lehr.sandbox.base.Spec` has it.
    max_turns, max_tokens: completions per episode, and new tokens per completion.
    stop: strings that end a completion.
    """

    model_config = _FROZEN
    id: str
    domain: str
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    files: dict[str, str] = Field(default_factory=dict[str, str])
    image: str = "host"
    allow_hosts: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    artifacts: tuple[str, ...] = ()
    reward: tuple[RewardTerm, ...] = ()
    resources: Resources = Field(default_factory=lambda: Resources.model_validate({}))
    timeout_s: float = Field(default=30.0, gt=0)
    max_turns: int = Field(default=1, ge=1)
    max_tokens: int = Field(default=128, ge=1)
    stop: tuple[str, ...] = ()
    level: int = 0

    @field_validator("messages")
    @classmethod
    def _not_empty(cls, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        if not messages:
            raise ValueError("a task needs at least one message")
        return messages

    def __hash__(self) -> int:
        return hash(self.id)


@dataclass(frozen=True, slots=True)
class Gold:
    """What only the verifier may see. ``repr`` shows nothing, so that a log cannot leak it.

    answer: a completion (or one per turn) that earns full marks; also the demonstration for SFT.
    data: whatever the domain's verifier needs (tests, expected fields, expected state).
    """

    answer: tuple[str, ...]
    data: Mapping[str, Any]

    def __repr__(self) -> str:
        return "Gold(sealed)"


@dataclass(frozen=True, slots=True)
class Problem:
    """A task together with its gold. Only the verifier's side unpacks ``gold``."""

    task: Task
    gold: Gold
