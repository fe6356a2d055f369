"""A reward model as a judge: it scores finished traces, and its score is, or becomes part of, their reward."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lehr.core.reward import Invalid, Reward, Valid
from lehr.core.task import Message, Task
from lehr.core.trace import Segment
from lehr.model.chat import ChatRenderer
from lehr.pipeline.beside import Scoring, open_beside, score_all
from lehr.pipeline.compare import turns_of
from lehr.pipeline.context import Context
from lehr.pipeline.conversations import Conversation, to_sample
from lehr.pipeline.models import context_tokens, load_renderer, locate_reward_model
from lehr.pipeline.pairs import scored_at_end
from lehr.pipeline.stages.preferences import RewardFrom
from lehr.rollout.base import Group, Judged

SCORE = "reward_model"
"""The part of a reward that holds the score; ``verified`` holds what verifiers said."""


@dataclass(frozen=True, slots=True)
class RewardModel:
    """Scores attempts. renderer: the reward model's own. same: whether it reads the policy's tokens as they
    are; where it has another vocabulary, it is shown what was said. longest: tokens that it can read.
    """

    model: Scoring
    weight: float
    policy: ChatRenderer
    renderer: ChatRenderer
    same: bool
    longest: int

    async def rewarded(self, group: Group, task: Task) -> Group:
        """Return the group with ``(1 - weight) * verified + weight * score`` as its members' rewards. One that
        could not be judged stays so, and so becomes one that cannot be scored.
        """
        tokens = {
            number: self._tokens(member.trace.segments[-1], task)
            for number, member in enumerate(group.members)
            if isinstance(member.reward, Valid) and member.trace.failure is None and member.trace.segments
        }
        fitting = [number for number, ids in tokens.items() if len(ids) <= self.longest]
        said = await score_all(self.model, [scored_at_end(tokens[number]) for number in fitting])
        scores = {number: float(one[0]) for number, one in zip(fitting, said, strict=True)}
        members = [
            self._rewarded(member, len(tokens[number]), scores.get(number)) if number in tokens else member
            for number, member in enumerate(group.members)
        ]
        return replace(group, members=tuple(members))

    def _rewarded(self, member: Judged, length: int, score: float | None) -> Judged:
        if score is None:
            why = f"the reward model reads {self.longest} tokens, and the trace has {length}"
            return replace(member, reward=Invalid("verifier_crash", why))
        return replace(member, reward=mixed(member.reward, score, self.weight))

    def _tokens(self, segment: Segment, task: Task) -> NDArray[np.int32]:
        if self.same:
            return segment.tokens
        said = list(turns_of(segment, self.policy))
        messages = [*task.messages, *(Message(role=speaker, content=text) for speaker, text in said)]
        if messages[-1].role != "assistant":  # it said nothing
            messages.append(Message(role="assistant", content=""))
        shown = Conversation(tuple(messages), tuple(m.role == "assistant" for m in messages), task.tools)
        return to_sample(shown, self.renderer).tokens


def mixed(reward: Reward, score: float, weight: float) -> Reward:
    """Return the reward with a reward model's score in it; an invalid one as it is."""
    if not isinstance(reward, Valid):
        return reward
    if not math.isfinite(score):
        return Invalid("not_finite", f"the reward model's score is {score}")
    value = (1 - weight) * reward.value + weight * score
    return replace(reward, value=value, parts={**reward.parts, "verified": reward.value, SCORE: score})


def reward_folder(ctx: Context, setting: RewardFrom) -> Path:
    """Return the folder of the reward model that a stage names."""
    folder = ctx.folder.require_checkpoint(setting.stage) if setting.stage else Path(setting.path)
    return locate_reward_model(folder)


@asynccontextmanager
async def open_rewarding(ctx: Context, setting: RewardFrom, policy: Path) -> AsyncGenerator[RewardModel]:
    """Start the reward model beside the policy; end it whatever happens."""
    folder = reward_folder(ctx, setting)
    async with open_beside(ctx, "reward", folder) as model:
        yield RewardModel(
            model,
            setting.weight,
            ctx.renderer,
            load_renderer(folder),
            _read_alike([policy, folder]),
            context_tokens(folder),
        )


def _read_alike(folders: Sequence[Path]) -> bool:
    """Return whether the models' tokenizers and chat templates are the same files."""
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    one, other = ([_bytes(folder / name) for name in names] for folder in folders)
    return one == other


def _bytes(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
