"""Groups, rewards and advantages."""

import json

import numpy as np
import pytest

from lehr.core.reward import Invalid, Valid
from lehr.train.advantages import RunningScale, Scored, credit, group_advantages, normalised_sum


def scored(*rows: tuple[str, str, float | None]) -> list[Scored]:
    return [
        Scored(group, trace, Invalid("sandbox") if value is None else Valid(value))
        for group, trace, value in rows
    ]


def test_the_mean_is_taken_off_and_the_spread_is_not_divided_by():
    assert group_advantages([0.0, 1.0, 1.0, 0.0]).tolist() == [-0.5, 0.5, 0.5, -0.5]
    assert group_advantages([0.0, 10.0]).tolist() == [-5.0, 5.0]


def test_r8_a_lost_member_shifts_nobody_else():
    rows = [
        ("a", "a0", 1.0),
        ("b", "b0", 0.0),
        ("a", "a1", 0.0),
        ("b", "b1", 1.0),
        ("b", "b2", 1.0),
        ("a", "a2", 0.5),
    ]
    whole = credit(scored(*rows))
    assert whole == pytest.approx([0.5, -2 / 3, -0.5, 1 / 3, 1 / 3, 0.0])
    lost = credit(scored(*(row for row in rows if row[1] != "a1")))
    assert lost == pytest.approx([0.25, -2 / 3, 1 / 3, 1 / 3, -0.25])


def test_r9_a_singleton_has_advantage_zero():
    assert group_advantages([0.7]).tolist() == [0.0]
    assert credit(scored(("a", "a0", 1.0), ("b", "b0", 1.0), ("b", "b1", 0.0))) == [0.0, 0.5, -0.5]


def test_r10_groups_with_one_prompt_stay_two_groups():
    rows = [("first", f"x{i}", 0.0) for i in range(4)] + [("second", f"y{i}", 1.0) for i in range(4)]
    assert credit(scored(*rows)) == [0.0] * 8


def test_r11_a_trace_split_into_samples_counts_once():
    rows = [("g", "long", 1.0), ("g", "long", 1.0), ("g", "long", 1.0), ("g", "short", 0.0)]
    assert credit(scored(*rows)) == [0.5, 0.5, 0.5, -0.5]


def test_equal_rewards_give_exact_zeros():
    for value in (0.1, 1 / 3, 0.7, 1e-9):
        assert group_advantages([value] * 7).tolist() == [0.0] * 7


def test_r15_parts_are_normalised_one_by_one():
    parts = [{"tests": 1.0, "length": 900.0}, {"tests": 0.0, "length": 100.0}, {"tests": 1.0, "length": 100.0}]
    found = normalised_sum(parts)
    scaled = normalised_sum([{"tests": p["tests"], "length": p["length"] / 1000} for p in parts])
    assert found == pytest.approx(scaled)
    tests = np.array([1, 0, 1]) - 2 / 3
    length = np.array([900, 100, 100]) - 1100 / 3
    expected = tests / tests.std() + length / length.std()
    assert found == pytest.approx(expected)
    assert normalised_sum(parts, {"length": 0.0}) == pytest.approx(tests / tests.std())


def test_r16_survivors_stay_if_scored_one_by_one_and_go_if_scored_as_a_group():
    rows = scored(("g", "0", 1.0), ("g", "1", None), ("g", "2", 0.0), ("h", "3", 1.0), ("h", "4", 0.0))
    assert credit(rows) == [0.5, None, -0.5, 0.5, -0.5]
    assert credit(rows, scored_jointly=True) == [None, None, None, 0.5, -0.5]


def test_r17_an_infrastructure_failure_is_never_a_zero():
    rows = scored(("g", "0", 1.0), ("g", "1", 1.0), *(("g", str(n), None) for n in range(2, 16)))
    assert credit(rows) == [0.0, 0.0] + [None] * 14
    assert credit(scored(("g", "0", None), ("g", "1", None))) == [None, None]


def test_the_scale_follows_the_units_of_the_domain():
    one, ten = RunningScale(), RunningScale()
    random = np.random.default_rng(0)
    for _ in range(40):
        advantages = group_advantages(random.random(8).tolist())
        one.update(advantages)
        ten.update(10 * advantages)
        assert 10 * advantages / ten.value == pytest.approx(advantages / one.value)
    assert one.value == pytest.approx(np.sqrt(1 / 12 * 7 / 8), rel=0.1)


def test_the_scale_has_a_floor_and_ignores_groups_without_variance():
    scale = RunningScale(decay=0.5, floor=0.2)
    assert scale.value == 1.0
    scale.update([0.0, 0.0])
    assert scale.value == 1.0
    scale.update([3.0, -3.0])
    assert scale.value == pytest.approx(3.0)
    for _ in range(60):
        scale.update([1e-6, -1e-6])
    assert scale.value == pytest.approx(0.6)


def test_the_scale_survives_a_save():
    scale = RunningScale()
    scale.update([1.0, -1.0])
    again = RunningScale.restore(json.loads(json.dumps(scale.state())))
    for target in (scale, again):
        target.update([0.25, -0.25])
    assert again.value == scale.value
    assert again.state() == scale.state()
