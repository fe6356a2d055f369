"""Pairs of answers, one preferred to the other: from attempts at one task that were judged, or from a file.

A line of the file is an object with ``prompt`` (a text or messages), ``chosen`` and ``rejected`` (a text or the
messages that follow the prompt, the assistant's last), and perhaps ``margin``, by how much a reward model is to
prefer the one. Without ``prompt``, both sides are whole conversations, and the prompt is what they begin alike
with. Other keys of a line are its author's and are not read.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from lehr.core.batch import Batch, LossName, Sample
from lehr.core.reward import Credit, Valid
from lehr.core.task import Message
from lehr.model.chat import ChatRenderer
from lehr.model.messages import ChatMessage, without_null
from lehr.pipeline.conversations import Conversation, read_jsonl, to_sample
from lehr.rollout.base import Group

SHAPE = '{"prompt": …, "chosen": …, "rejected": …}, each a text or messages'


@dataclass(frozen=True, slots=True)
class Pair:
    """Two answers to one prompt; ``own`` marks the tokens of the answers. key: names the pair. prompt: equal
    for pairs of one prompt. margin: how far ahead a reward model is to put the chosen one.
    """

    key: str
    prompt: str
    chosen: Sample
    rejected: Sample
    margin: float = 0.0


# ---- from verifiers


def pairs_of(groups: Sequence[Group], *, credit: Credit = "passed", per_task: int = 1) -> list[Pair]:
    """Return at most ``per_task`` pairs of each group, those that differ most in credit first.

    Only attempts that could be judged take part, and only those of one segment: a trace that was cut into
    several has no single sequence to compare.
    """
    found: list[Pair] = []
    for group in groups:
        sides = [
            (m.reward.credit(credit), m.trace.id, m.trace.segments[0])
            for m in group.valid
            if isinstance(m.reward, Valid) and len(m.trace.segments) == 1 and m.trace.segments[0].own.any()
        ]
        better = [
            (high - low, one, other)
            for high, one_id, one in sides
            for low, other_id, other in sides
            if high > low and one.tokens.tobytes() != other.tokens.tobytes() and one_id != other_id
        ]
        better.sort(key=lambda pair: -pair[0])
        for number, (_, one, other) in enumerate(islice(better, per_task)):
            key = f"{group.id}/{number}"
            chosen, rejected = (_bare(s.tokens, s.own, group.domain) for s in (one, other))
            found.append(Pair(key, group.id, chosen, rejected))
    return found


def _bare(tokens: NDArray[Any], own: NDArray[Any], domain: str) -> Sample:
    zeros = np.zeros(len(tokens), np.float32)
    return Sample(tokens=tokens, own=own, logprobs=zeros, advantages=zeros, domain=domain)


# ---- from a file


def read_pairs(path: Path, renderer: ChatRenderer | None = None, *, max_tokens: int = 0) -> list[Pair]:
    """Return the pairs of a file. Without a renderer the lines are checked and nothing is returned.

    Raises :class:`ConfigError` that names every bad line (up to a number), one of more than ``max_tokens`` too.
    """

    def parse(line: bytes, where: str) -> Pair | None:
        sides, margin = _parse(line, renderer)
        if renderer is None:
            return None
        chosen, rejected = (to_sample(replace(side, where=where), renderer) for side in sides)
        for name, sample in (("chosen", chosen), ("rejected", rejected)):
            prompt = int(np.argmax(sample.own))
            if prompt >= max_tokens:
                raise ValueError(f"the prompt has {prompt} tokens; expected fewer than {max_tokens}")
            if len(sample.tokens) > max_tokens:
                raise ValueError(
                    f"prompt and {name} have {len(sample.tokens)} tokens; expected at most {max_tokens}"
                )
        start = chosen.tokens[: int(np.argmax(chosen.own))].tobytes()
        return Pair(where, hashlib.blake2b(start, digest_size=16).hexdigest(), chosen, rejected, margin)

    return [pair for pair in read_jsonl(path, parse, expected=SHAPE) if pair is not None]


def _parse(line: bytes, renderer: ChatRenderer | None) -> tuple[tuple[Conversation, Conversation], float]:
    """Raises ``ValueError`` that says what is wrong with the line."""
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"a {type(raw).__name__}; expected an object")
    fields = cast("dict[str, Any]", without_null(cast("dict[str, Any]", raw)))
    if missing := [name for name in ("chosen", "rejected") if name not in fields]:
        raise ValueError(f"no {missing[0]!r}; found {', '.join(map(repr, fields)) or 'nothing'}")
    margin = fields.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not 0 <= margin < 1e6:
        raise ValueError(f"margin is {margin!r}; expected a number from 0 on")
    chosen, rejected = (_messages(fields[n], n, "assistant", renderer) for n in ("chosen", "rejected"))
    if "prompt" in fields:
        prompt = _messages(fields["prompt"], "prompt", "user", renderer)
    else:
        prompt = _common(chosen, rejected)
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    if not prompt or prompt[0].role == "assistant":
        raise ValueError("no prompt; expected 'prompt', or conversations that begin alike")
    if chosen == rejected:
        raise ValueError("chosen and rejected are equal")
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if not side or side[-1].role != "assistant":
            raise ValueError(f"{name} does not end with a message of the assistant")
    return (_conversation(prompt, chosen), _conversation(prompt, rejected)), float(margin)


def _messages(value: object, name: str, role: str, renderer: ChatRenderer | None) -> list[Message]:
    if isinstance(value, str) and not value.strip():
        raise ValueError(f"{name} is empty")
    said = cast("list[object]", value) if isinstance(value, list) else [{"role": role, "content": value}]
    form = renderer.call_form if renderer is not None else "tagged"
    try:
        return [ChatMessage.model_validate(message).message(form) for message in said]
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, (name, *first["loc"])))
        raise ValueError(f"{place}: {first['msg'].removeprefix('Value error, ')}") from error


def _common(one: Sequence[Message], other: Sequence[Message]) -> list[Message]:
    """Return what both begin with, up to the message before the assistant's last."""
    found: list[Message] = []
    for mine, theirs in zip(one[:-1], other[:-1], strict=False):
        if mine != theirs:
            break
        found.append(mine)
    return found


def _conversation(prompt: Sequence[Message], answer: Sequence[Message]) -> Conversation:
    learnt = [False] * len(prompt) + [message.role == "assistant" for message in answer]
    return Conversation((*prompt, *answer), tuple(learnt))


# ---- to samples


def held_out_pairs(pairs: Sequence[Pair], share: float, seed: int) -> tuple[list[Pair], list[Pair]]:
    """Return (to train on, held out): pairs of one prompt stand on one side. At least one prompt is held out
    where there are two and ``share`` is above 0.
    """
    prompts = sorted(
        {pair.prompt for pair in pairs},
        key=lambda prompt: hashlib.blake2b(prompt.encode(), key=str(seed).encode()).digest(),
    )
    count = max(1, round(share * len(prompts))) if share > 0 and len(prompts) > 1 else 0
    apart = set(prompts[:count])
    return [p for p in pairs if p.prompt not in apart], [p for p in pairs if p.prompt in apart]


def preference_samples(pair: Pair) -> tuple[Sample, Sample]:
    """Return both sides with a loss on the answers' tokens; a reference has to be added."""
    chosen = replace(pair.chosen, pair=pair.key, prefix=pair.key, preferred=True)
    return chosen, replace(pair.rejected, pair=pair.key, prefix=pair.key, preferred=False)


def reward_samples(pair: Pair) -> tuple[Sample, Sample]:
    """Return both sides with one score each, at the last token; the margin is what the chosen one is to be
    ahead by.
    """
    chosen = scored_at_end(pair.chosen.tokens, ahead=pair.margin)
    rejected = scored_at_end(pair.rejected.tokens)
    return (
        replace(chosen, pair=pair.key, prefix=pair.key),
        replace(rejected, pair=pair.key, prefix=pair.key, preferred=False),
    )


def score_gaps(said: Sequence[NDArray[np.float32]]) -> list[float]:
    """Return by how much each pair's preferred side is ahead, from the scores of :func:`reward_samples`."""
    scores = [float(one[0]) for one in said]
    return [chosen - rejected for chosen, rejected in zip(scores[::2], scores[1::2], strict=True)]


def agreement(gaps: Sequence[float]) -> float:
    """Return how many pairs have their preferred side ahead; a tie is half of one."""
    return sum(1.0 if gap > 0 else 0.5 if gap == 0 else 0.0 for gap in gaps)


def scored_at_end(tokens: NDArray[Any], ahead: float = 0.0) -> Sample:
    """Return a sample whose one score stands at the last of ``tokens``: a scalar head says of an own token what
    it makes of everything before it, and so one token is added that is never read.
    """
    size = len(tokens) + 1
    own = np.zeros(size, np.bool_)
    own[-1] = True
    zeros = np.zeros(size, np.float32)
    return Sample(
        tokens=np.append(tokens, tokens[-1]).astype(np.int32),
        own=own,
        logprobs=zeros,
        advantages=zeros,
        returns=np.where(own, np.float32(ahead), np.float32(0)),
    )


def pair_batches(
    pairs: Sequence[tuple[Sample, Sample]], loss: LossName, *, epoch: int, batch_size: int, seed: int, step: int
) -> Iterator[Batch]:
    """Yield the batches of one epoch, ``batch_size`` pairs each, shuffled by (seed, epoch); the first one
    counts as ``step``.
    """
    order = list(range(len(pairs)))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    for number, start in enumerate(range(0, len(order), batch_size)):
        chosen = [sample for i in order[start : start + batch_size] for sample in pairs[i]]
        yield Batch(step + number, loss, tuple(chosen))
