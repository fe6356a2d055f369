"""Pairs from files and from judged attempts, and what a reward model makes of a verdict."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from lehr.core.batch import Sample
from lehr.core.errors import ConfigError
from lehr.core.reward import Invalid, Valid
from lehr.core.task import Message, Task
from lehr.core.trace import Segment, Trace
from lehr.model.chat import ChatRenderer
from lehr.model.tiny import random_decoder, tiny_config
from lehr.model.tokenizer import ByteTokenizer
from lehr.pipeline.pairs import (
    held_out_pairs,
    pair_batches,
    pairs_of,
    preference_samples,
    read_pairs,
    reward_samples,
)
from lehr.pipeline.recipe import Recipe
from lehr.pipeline.rewarding import RewardModel, mixed
from lehr.pipeline.stages.ppo import credited
from lehr.pipeline.stages.preferences import CriticConfig
from lehr.rollout.base import Group, Judged
from lehr.train.scorer import FrozenModel

RENDERER = ChatRenderer(ByteTokenizer())
GOOD = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}


def write(tmp_path, *lines):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def text(sample):
    return bytes(int(t) for t in sample.tokens[sample.own] if t < 256).decode()


def test_texts_and_messages_and_whole_conversations_give_the_same_pair(tmp_path):
    user = {"role": "user", "content": "2 + 2?"}
    sides = {n: [{"role": "assistant", "content": GOOD[n]}] for n in ("chosen", "rejected")}
    whole = {n: [user, *side] for n, side in sides.items()}
    file = write(tmp_path, GOOD, "", {"prompt": [user], **sides}, {**whole, "margin": 0.5, "note": "mine"})
    found = read_pairs(file, RENDERER, max_tokens=200)
    assert [pair.key.rpartition(":")[2] for pair in found] == ["1", "3", "4"]
    assert [pair.margin for pair in found] == [0, 0, 0.5]
    assert len({pair.prompt for pair in found}) == 1
    for pair in found:
        assert (text(pair.chosen), text(pair.rejected)) == ("4", "5")
        assert pair.chosen.tokens.tolist() == found[0].chosen.tokens.tolist()
        assert pair.chosen.tokens[-1] == ByteTokenizer.IM_END


def test_only_the_answers_of_a_conversation_carry_a_loss(tmp_path):
    prompt = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "before"},
        {"role": "user", "content": "b"},
    ]
    (pair,) = read_pairs(write(tmp_path, {**GOOD, "prompt": prompt}), RENDERER, max_tokens=200)
    assert text(pair.chosen) == "4"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not JSON"),
        ("[1]", "a list; expected an object"),
        ({"prompt": "a", "chosen": "b"}, "no 'rejected'; found 'prompt', 'chosen'"),
        ({**GOOD, "rejected": "4"}, "chosen and rejected are equal"),
        ({**GOOD, "chosen": " "}, "chosen is empty"),
        (
            {**GOOD, "chosen": [{"role": "user", "content": "x"}]},
            "does not end with a message of the assistant",
        ),
        ({**GOOD, "chosen": 3}, r"chosen\.0?\.?content"),
        ({**GOOD, "margin": -1}, "margin is -1"),
        ({"chosen": "4", "rejected": "5"}, "no prompt"),
        ({**GOOD, "prompt": "x" * 80}, r"the prompt has \d+ tokens; expected fewer than 60"),
        ({**GOOD, "rejected": "y" * 40}, r"prompt and rejected have \d+ tokens; expected at most 60"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path, line, why):
    file = write(tmp_path, GOOD, line)
    with pytest.raises(ConfigError, match=rf"pairs\.jsonl:2: .*{why}"):
        read_pairs(file, RENDERER, max_tokens=60)


def test_all_bad_lines_are_told_at_once_before_a_model_is_there(tmp_path):
    file = write(tmp_path, "{", GOOD, {**GOOD, "rejected": "4"})
    with pytest.raises(ConfigError, match=r"2 lines cannot be used:\n.*jsonl:1: .*\n.*jsonl:3: "):
        read_pairs(file)
    assert read_pairs(write(tmp_path, GOOD)) == []


def segment(tokens):
    size = len(tokens)
    own = np.arange(size) >= 2
    zeros = np.zeros(size, np.float32)
    ids = np.asarray(tokens, np.int32)
    return Segment(ids, own, zeros, zeros, zeros, np.zeros(size, np.int64), np.asarray([2], np.int32))


def judged(name, reward, *tokens):
    return Judged(Trace(name, "t", "g", 0, tuple(segment([1, 2, *one]) for one in tokens)), reward)


def group(*members):
    return Group("g", "d", "t", members)


def test_pairs_are_made_of_attempts_that_differ_the_greatest_difference_first():
    found = group(
        judged("a", Valid(1.0, passed=True), [3]),
        judged("b", Valid(0.5), [4]),
        judged("c", Valid(0.2), [5]),
        judged("d", Invalid("sandbox"), [6]),
        judged("e", Valid(0.0), [7], [8]),  # two segments: no single sequence
    )
    by_value = pairs_of([found], credit="value", per_task=2)
    assert [(p.chosen.tokens[-1], p.rejected.tokens[-1]) for p in by_value] == [(3, 5), (3, 4)]
    by_pass = pairs_of([found], credit="passed", per_task=9)
    assert [(p.chosen.tokens[-1], p.rejected.tokens[-1]) for p in by_pass] == [(3, 4), (3, 5)]
    same = group(judged("a", Valid(1.0, passed=True), [3]), judged("b", Valid(0.0), [3]))
    assert pairs_of([same]) == []


def test_samples_of_a_pair_say_what_is_compared(tmp_path):
    (pair,) = read_pairs(write(tmp_path, {**GOOD, "margin": 0.5}), RENDERER, max_tokens=99)
    chosen, rejected = preference_samples(pair)
    assert chosen.pair == rejected.pair == chosen.prefix and chosen.preferred and not rejected.preferred
    chosen, rejected = reward_samples(pair)
    assert chosen.own.nonzero()[0].tolist() == [len(pair.chosen.tokens)]
    assert chosen.tokens[:-1].tolist() == pair.chosen.tokens.tolist()
    assert (chosen.returns[-1], rejected.returns[-1]) == (0.5, 0)


def test_an_epoch_has_every_pair_once_and_whole(tmp_path):
    lines = [{**GOOD, "prompt": f"p{i}"} for i in range(7)]
    pairs = [reward_samples(p) for p in read_pairs(write(tmp_path, *lines), RENDERER, max_tokens=99)]
    orders = []
    for epoch in (0, 1):
        batches = list(pair_batches(pairs, "reward", epoch=epoch, batch_size=3, seed=1, step=5))
        assert [b.step for b in batches] == [5, 6, 7] and [len(b.samples) for b in batches] == [6, 6, 2]
        flat = [s for b in batches for s in b.samples]
        assert [s.preferred for s in flat] == [True, False] * 7
        assert all(one.pair == other.pair for one, other in zip(flat[::2], flat[1::2], strict=True))
        orders.append([s.pair for s in flat])
    assert sorted(orders[0]) == sorted(orders[1]) and orders[0] != orders[1]


def test_pairs_of_one_prompt_stay_on_one_side(tmp_path):
    lines = [{**GOOD, "prompt": f"p{i % 10}", "rejected": f"{i}x"} for i in range(30)]
    pairs = read_pairs(write(tmp_path, *lines), RENDERER, max_tokens=99)
    kept, held = held_out_pairs(pairs, 0.2, 0)
    assert len({p.prompt for p in held}) == 2 and len(held) == 6 and len(kept) == 24
    assert not {p.prompt for p in kept} & {p.prompt for p in held}
    assert held_out_pairs(pairs, 0.0, 0) == (pairs, [])
    assert held_out_pairs(pairs[:1], 0.5, 0) == (pairs[:1], [])


def test_r17_a_score_is_mixed_in_and_what_could_not_be_judged_stays_so():
    reward = Valid(0.5, {"json": 1.0}, passed=True)
    got = mixed(reward, 2.0, 0.25)
    assert got == replace(reward, value=0.875, parts={"json": 1.0, "verified": 0.5, "reward_model": 2.0})
    assert mixed(reward, 2.0, 1.0).value == 2.0
    assert mixed(Invalid("sandbox", "gone"), 2.0, 0.5) == Invalid("sandbox", "gone")
    assert mixed(reward, float("nan"), 0.5).reason == "not_finite"


def test_credit_flows_over_the_segments_of_an_attempt_and_stays_on_own_tokens():
    def sample(size, own):
        mask = np.zeros(size, bool)
        mask[own] = True
        zeros = np.zeros(size, np.float32)
        return Sample(np.arange(size, dtype=np.int32), mask, np.where(mask, -1, 0).astype(np.float32), zeros)

    attempts = [(1.0, (sample(5, [2, 4]), sample(3, [1]))), (0.0, (sample(3, [1, 2]),))]
    values = [np.zeros(2, np.float32), np.zeros(1, np.float32), np.full(2, 0.5, np.float32)]
    settings = CriticConfig(gamma=0.5, lam=1.0, whiten=False, kl=1.0)
    reference = [np.full(len(v), -1.5, np.float32) for v in values]
    made, divergence = credited(attempts, values, reference, settings)
    assert divergence == 0.5
    np.testing.assert_allclose(made[1].returns, [0, 0.5, 0])  # 1 - 0.5
    np.testing.assert_allclose(made[0].returns, [0, 0, -0.625, 0, -0.25])
    np.testing.assert_allclose(made[2].advantages, [0, -0.75 - 0.5, -0.5 - 0.5])
    np.testing.assert_allclose(made[2].values, [0, 0.5, 0.5])
    assert all(not s.returns[~s.own].any() for s in made)


def test_a_reward_model_scores_what_was_said_whoever_tokenises_it():
    decoder = random_decoder(tiny_config(num_layers=1).with_scalar_head(), std=0.2)
    task = Task(id="t", domain="d", messages=(Message(role="user", content="2 + 2?"),))
    prompt = RENDERER.start(task.messages)

    def member(name, reward, said):
        ids = np.asarray([*prompt, *RENDERER.complete(said)], np.int32)
        own = np.arange(len(ids)) >= len(prompt)
        zeros = np.zeros(len(ids), np.float32)
        versions, turns = np.zeros(len(ids), np.int64), np.asarray([len(prompt)], np.int32)
        one = Segment(ids, own, zeros, zeros, zeros, versions, turns)
        return Judged(Trace(name, "t", "g", 0, (one,)), reward)

    found = group(
        member("a", Valid(1.0, passed=True), "4"),
        member("b", Invalid("sandbox"), "5"),
        member("c", Valid(0.0), "five"),
        member("d", Valid(0.0), "x" * 300),
    )
    scored = []
    for same in (True, False):
        model = RewardModel(FrozenModel(decoder), 0.5, RENDERER, RENDERER, same, longest=200)
        scored.append(asyncio.run(model.rewarded(found, task)))
    assert scored[0] == scored[1]
    a, b, c, d = (m.reward for m in scored[0].members)
    assert b == Invalid("sandbox") and isinstance(d, Invalid) and "reads 200 tokens" in d.detail
    tokens = [torch.from_numpy(found.members[i].trace.segments[0].tokens.astype(np.int64)) for i in (0, 2)]
    hidden = [decoder.hidden(t, torch.arange(len(t)), causal)[-1] for t in tokens]
    said = [float((h @ decoder.head.weight[0]).detach()) for h in hidden]
    assert [a.parts["reward_model"], c.parts["reward_model"]] == pytest.approx(said, abs=1e-4)
    assert a.value == pytest.approx(0.5 + said[0] / 2, abs=1e-4) and a.passed and not c.passed


def causal(layer, query, key, value):
    mixed = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1)[None] for x in (query, key, value)), is_causal=True, enable_gqa=True
    )
    return mixed[0].transpose(0, 1)


def test_recipes_that_cannot_be_run_are_refused():
    def recipe(*stages):
        return Recipe.model_validate({"model": "tiny", "domains": ["a"], "stages": stages})

    with pytest.raises(ValueError, match="needs a reward_model stage named 'r'"):
        recipe({"type": "rl", "reward_model": {"stage": "r"}})
    with pytest.raises(ValueError, match="either stage or path"):
        recipe({"type": "rl", "reward_model": {}})
    with pytest.raises(ValueError, match="credit='value'"):
        recipe({"type": "rl", "reward_model": {"path": "x"}, "credit": "passed"})
    with pytest.raises(ValueError, match="needs a reward_model"):
        recipe({"type": "rl", "advantage": "gae", "critic": {"start": "reward_model"}})
    recipe({"type": "reward_model", "name": "r"}, {"type": "rl", "reward_model": {"stage": "r"}})
