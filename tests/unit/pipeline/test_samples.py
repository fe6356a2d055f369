"""Groups to samples: whole attempts, turns, parts, lengths and the divergence from a reference."""

from dataclasses import replace

import numpy as np
import pytest

from lehr.core.errors import ConfigError
from lehr.core.reward import Invalid, Reward, Valid
from lehr.core.trace import Segment, Trace
from lehr.pipeline.samples import Crediting, DomainScales, cut, teaches, to_samples
from lehr.rollout.base import Group, Judged
from lehr.train.base import AdvantageConfig


def segment(*turns: int, between: int = 2) -> Segment:
    """A prompt of two tokens, then own turns of the given lengths with observations between them."""
    own, starts = [False, False], []
    for number, length in enumerate(turns):
        own += [False] * (between if number else 0)
        starts.append(len(own))
        own += [True] * length
    mask = np.array(own)
    zeros = np.zeros(len(own), np.float32)
    return Segment(
        tokens=np.arange(len(own), dtype=np.int32),
        own=mask,
        logprobs=zeros,
        raw_logprobs=zeros,
        kept_mass=np.ones(len(own), np.float32),
        versions=np.where(mask, 1, -1).astype(np.int64),
        turns=np.array(starts, np.int32),
    )


def group(
    *rewards: float | Reward, segments: list[list[Segment]] | None = None, stops: str = "", name: str = "g"
):
    def member(number: int, reward: float | Reward) -> Judged:
        judged = Valid(reward, passed=reward == 1.0) if isinstance(reward, (int, float)) else reward
        parts = tuple(segments[number]) if segments else (segment(2),)
        stop = "length" if stops[number : number + 1] == "l" else "eos"
        return Judged(Trace(f"{name}{number}", "task", name, number, parts, stop), judged)

    return Group(name, "d", "task", tuple(member(n, r) for n, r in enumerate(rewards)))


def rule(credit="value", negative_weight=1.0, reward_kl=0.0, **advantage: object) -> Crediting:
    return Crediting(credit, negative_weight, AdvantageConfig(**{"scale": "none", **advantage}), reward_kl)


def credited(*groups: Group, by: Crediting, samples=None) -> dict[str, list[float]]:
    """Advantages of own tokens by trace, segments one after the other."""
    found: dict[str, list[float]] = {}
    for s in to_samples(groups, DomainScales({}), by, samples):
        assert not s.advantages[~s.own].any()
        found.setdefault(s.trace_id, []).extend(float(a) for a in s.advantages[s.own])
    return found


def advantages(weight: float, *rewards: float) -> dict[str, float]:
    by = Crediting("value", weight)
    return {name: values[0] for name, values in credited(group(*rewards, name="t"), by=by).items()}


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_only_what_is_below_the_mean_is_weighted(weight: float):
    plain, weighted = advantages(1.0, 1, 0, 0, 0), advantages(weight, 1, 0, 0, 0)
    assert weighted["t0"] == plain["t0"] > 0
    for name in ("t1", "t2", "t3"):
        assert weighted[name] == pytest.approx(weight * plain[name]) and plain[name] < 0


def test_at_zero_the_worse_ones_are_left_out_and_the_better_ones_keep_their_advantage():
    assert advantages(0.0, 1, 0, 0, 0) == {"t0": advantages(1.0, 1, 0, 0, 0)["t0"]}
    assert advantages(0.0, 0.5, 0.5, 0.5) == advantages(1.0, 0.5, 0.5, 0.5), "no variance: all stay, at zero"


def test_r9_a_lone_survivor_has_advantage_zero():
    assert credited(group(1.0, Invalid("sandbox")), by=rule()) == {"g0": [0.0, 0.0]}


def test_r10_groups_of_one_prompt_stay_two_groups():
    found = credited(group(0.0, 0.0, name="a"), group(1.0, 1.0, name="b"), by=rule())
    assert found == {name: [0.0, 0.0] for name in ("a0", "a1", "b0", "b1")}


def test_r11_an_attempt_in_several_samples_counts_once_in_the_baseline():
    three = [segment(1), segment(1), segment(1)]
    found = credited(group(1.0, 0.0, segments=[three, [segment(1)]]), by=rule())
    assert found == {"g0": [0.5, 0.5, 0.5], "g1": [-0.5]}


def test_r17_invalid_attempts_are_in_no_baseline_and_no_batch():
    found = credited(group(1.0, Invalid("sandbox"), 0.5, Invalid("engine")), by=rule())
    assert found == {"g0": [0.25, 0.25], "g2": [-0.25, -0.25]}


def test_leave_one_out_compares_with_the_others():
    found = credited(group(1.0, 0.0, 0.25), by=rule(baseline="leave_one_out"))
    assert [found[f"g{n}"][0] for n in range(3)] == pytest.approx([1 - 0.125, -0.625, 0.25 - 0.5])


def test_scales_of_group_and_batch():
    groups = (group(0.0, 1.0, name="a"), group(0.0, 4.0, name="b"))
    of_group = credited(*groups, by=rule(scale="group"))
    assert of_group["a1"][0] == pytest.approx(0.5 / np.std([0, 1], ddof=1))
    assert of_group["b1"][0] == pytest.approx(of_group["a1"][0])
    of_batch = credited(*groups, by=rule(scale="batch"))
    size = np.sqrt(np.mean(np.square([0.5, 0.5, 2, 2])))
    assert of_batch["a1"][0] == pytest.approx(0.5 / size) and of_batch["b1"][0] == pytest.approx(2 / size)


def test_r15_parts_are_normalised_before_the_sum():
    rewards = [Valid(0, {"tests": t, "style": s}) for t, s in ((1.0, 0.0), (0.0, 0.0), (1.0, 100.0))]
    tests, style = np.array([1, 0, 1]) - 2 / 3, np.array([0, 0, 100]) - 100 / 3
    found = credited(group(*rewards), by=rule(normalise_parts=True, part_weights={"style": 0.5}))
    expected = tests / tests.std() + 0.5 * style / style.std()
    assert [found[f"g{n}"][0] for n in range(3)] == pytest.approx(expected, rel=1e-6)
    by = rule(normalise_parts=True)
    assert teaches(group(*rewards), by) is None and teaches(group(*rewards), rule()) == "no_variance"


def test_turns_are_credited_with_their_return_relative_to_the_same_turn_of_others():
    rewards = [Valid(1.0, turns=(0.0, 1.0)), Valid(0.0, turns=(1.0, 0.0)), Valid(0.0, turns=(0.5,))]
    segments = [[segment(2, 1)], [segment(1, 2)], [segment(3)]]
    found = credited(group(*rewards, segments=segments), by=rule(turns="return", turn_discount=0.5))
    first, second = np.array([0 + 0.5 * 2.0, 1 + 0.5 * 0.0, 0.5]), np.array([2.0, 0.0])
    first, second = first - first.mean(), second - second.mean()
    assert found["g0"] == pytest.approx([first[0], first[0], second[0]])
    assert found["g1"] == pytest.approx([first[1], second[1], second[1]])
    assert found["g2"] == pytest.approx([first[2]] * 3)
    assert credited(group(*rewards, segments=segments), by=rule())["g0"] == pytest.approx([2 / 3] * 3)


def test_turns_go_on_over_the_segments_of_an_attempt():
    rewards = [Valid(0.0, turns=(0.0, 0.0, 3.0)), Valid(0.0, turns=(0.0, 0.0, 1.0))]
    segments = [[segment(1, 1), segment(2)], [segment(1), segment(1, 1)]]
    found = credited(group(*rewards, segments=segments), by=rule(turns="return", turn_discount=0.0))
    assert found == {"g0": [0.0, 0.0, 1.0, 1.0], "g1": [0.0, 0.0, -1.0]}


def test_a_turn_that_one_attempt_alone_reached_has_advantage_zero():
    rewards = [Valid(0.0, turns=(0.0, 1.0)), Valid(0.0, turns=(0.0,))]
    found = credited(group(*rewards, segments=[[segment(1, 1)], [segment(1)]]), by=rule(turns="return"))
    assert found == {"g0": [0.5, 0.0], "g1": [-0.5]}


def test_more_credit_than_turns_is_refused():
    rewards = [Valid(0.0, turns=(0.0, 1.0)), Valid(0.0, turns=(0.0, 0.0))]
    with pytest.raises(ConfigError, match="credits 2 turns"):
        credited(group(*rewards), by=rule(turns="return"))


def test_overlong_attempts_are_masked_and_stay_in_the_baseline():
    found = credited(group(1.0, 0.0, 0.5, stops="eel"), by=rule(overlong="mask"))
    assert found == {"g0": [0.5, 0.5], "g1": [-0.5, -0.5]}
    longer = group(1.0, 0.0, segments=[[segment(9)], [segment(2)]])
    assert set(credited(longer, by=rule(overlong="mask", overlong_tokens=8))) == {"g1"}


@pytest.mark.parametrize(("length", "lost"), [(6, 0.0), (7, 0.25), (9, 0.75), (10, 1.0), (30, 1.0)])
def test_length_is_penalised_softly_before_the_limit(length: int, lost: float):
    by = rule(overlong="penalise", overlong_tokens=10, overlong_margin=4, overlong_penalty=2.0)
    found = credited(group(1.0, 1.0, segments=[[segment(length)], [segment(1)]]), by=by)
    assert found["g1"][0] - found["g0"][0] == pytest.approx(2 * lost)


def test_what_would_have_no_effect_is_refused():
    with pytest.raises(ValueError, match="overlong_tokens"):
        AdvantageConfig(overlong="penalise")
    with pytest.raises(ValueError, match="normalise_parts = true"):
        AdvantageConfig(part_weights={"tests": 2.0})
    with pytest.raises(ValueError, match="choose one"):
        AdvantageConfig(normalise_parts=True, turns="return")
    with pytest.raises(ValueError, match="turn_discount is for"):
        AdvantageConfig(turn_discount=0.9)


def test_the_divergence_of_an_attempt_is_taken_off_its_reward():
    attempts = group(1.0, 0.0, segments=[[segment(2), segment(1)], [segment(2)]])
    logprobs = {"g0": -1.0, "g1": -3.0}
    samples = [
        replace(
            s,
            logprobs=np.where(s.own, np.float32(logprobs[s.trace_id]), np.float32(0)),
            reference=np.where(s.own, np.float32(-2), np.float32(0)),
        )
        for s in cut([attempts])
    ]
    found = credited(attempts, by=rule(reward_kl=0.1), samples=samples)
    rewards = [1.0 - 0.1 * 3 * 1.0, 0.0 - 0.1 * 2 * -1.0]
    half = (rewards[0] - rewards[1]) / 2
    assert found["g0"] == pytest.approx([half] * 3, rel=1e-6) and found["g1"] == pytest.approx([-half] * 2)
    with pytest.raises(ConfigError, match="reference"):
        credited(attempts, by=rule(reward_kl=0.1))


def test_r12_a_group_without_variance_teaches_nothing_whatever_its_divergence():
    assert teaches(group(1.0, 1.0), rule(reward_kl=1.0)) == "no_variance"
    assert teaches(group(1.0, Invalid("sandbox")), rule()) == "no_survivors"
    assert teaches(group(1.0, 0.0), rule()) is None


def test_the_order_of_groups_and_members_changes_nothing():
    one, other = group(0.1, 0.7, 0.4, name="a"), group(0.9, 0.2, name="b")
    backwards = [replace(g, members=g.members[::-1]) for g in (other, one)]
    for by in (rule(), rule(scale="batch"), rule(scale="group", baseline="leave_one_out")):
        plain, turned = credited(one, other, by=by), credited(*backwards, by=by)
        assert plain.keys() == turned.keys()
        for name in plain:
            assert plain[name] == pytest.approx(turned[name], rel=1e-6)
