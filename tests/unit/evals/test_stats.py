import math
import random

import pytest

from lehr.evals.stats import paired_difference, pass_at_k, wilson


@pytest.mark.parametrize(
    ("passed", "n", "low", "high"),
    [
        (0, 10, 0.0, 0.2775327998628892),
        (10, 10, 0.7224672001371107, 1.0),
        (1, 29, 0.0061132142, 0.1717552259),
        (15, 148, 0.0623860000, 0.1605347000),
        (81, 263, 0.2552828000, 0.3662003000),
    ],
)
def test_wilson_agrees_with_published_values(passed: int, n: int, low: float, high: float) -> None:
    # 81/263, 15/148 and 1/29 are the examples of Newcombe 1998 (Statistics in Medicine 17, 857-872), method 3;
    # with nothing passed, the upper bound is z^2 / (n + z^2)
    assert wilson(passed, n) == pytest.approx((low, high), abs=1e-4)


def test_wilson_without_data_says_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)
    with pytest.raises(ValueError, match="5 of 3"):
        wilson(5, 3)


def test_wilson_covers_about_95_percent() -> None:
    rng = random.Random(0)
    for p in (0.05, 0.3, 0.7):
        hits = 0
        for _ in range(2000):
            passed = sum(rng.random() < p for _ in range(100))
            low, high = wilson(passed, 100)
            hits += low <= p <= high
        assert 0.93 < hits / 2000 < 0.985


def test_a_paired_difference_by_hand() -> None:
    a = {"t1": True, "t2": True, "t3": False, "t4": True, "only a": True}
    b = {"t1": False, "t2": True, "t3": False, "t4": False, "only b": True}
    result = paired_difference(a, b)
    # differences 1, 0, 0, 1: mean 1/2, sample variance 1/3, standard error sqrt(1/12)
    half = 1.959963984540054 * math.sqrt(1 / 12)
    assert (result.n, result.diff) == (4, 0.5)
    assert (result.low, result.high) == pytest.approx((0.5 - half, min(1.0, 0.5 + half)))
    swapped = paired_difference(b, a)
    assert (swapped.low, swapped.high) == pytest.approx((-result.high, -result.low))


def test_strata_take_out_the_variance_between_domains() -> None:
    a = {f"x{n}": n % 10 != 0 for n in range(100)} | {f"y{n}": n % 10 == 0 for n in range(100)}
    b = {f"x{n}": False for n in range(100)} | {f"y{n}": False for n in range(100)}
    strata = {task: task[0] for task in a}
    pooled, stratified = paired_difference(a, b), paired_difference(a, b, strata)
    assert pooled.diff == stratified.diff == pytest.approx(0.5)
    # within each domain the variance is 0.09 * 100/99; between them 0.16 comes on top
    half = 1.959963984540054 * math.sqrt(2 * 0.25 * 0.09 / 99)
    assert stratified.high - stratified.diff == pytest.approx(half)
    assert pooled.high - pooled.diff > 1.5 * half


def test_no_data_and_no_disagreement_are_not_certainty() -> None:
    assert paired_difference({}, {"a": 1.0}) == paired_difference({"x": 1.0}, {})
    nothing = paired_difference({}, {})
    assert (nothing.diff, nothing.low, nothing.high, nothing.n) == (0.0, -1.0, 1.0, 0)
    same = {f"t{n}": True for n in range(50)}
    result = paired_difference(same, same)
    assert result.diff == 0
    assert result.low < -0.02
    assert result.high > 0.02
    one = paired_difference({"a": True}, {"a": False})
    assert one.low <= 0, "one task proves nothing"


def test_a_paired_interval_covers_about_95_percent() -> None:
    rng = random.Random(1)
    hits = 0
    for _ in range(1000):
        a, b = {}, {}
        for n in range(120):
            difficulty = rng.random()
            b[str(n)] = rng.random() < difficulty
            a[str(n)] = rng.random() < min(1.0, difficulty + 0.1 * (1 - difficulty))
        result = paired_difference(a, b)
        hits += result.low <= 0.05 <= result.high
    assert 0.92 < hits / 1000 < 0.98


def test_pass_at_k_is_the_chance_of_drawing_a_passing_attempt() -> None:
    assert pass_at_k(0, 10, 5) == 0.0
    assert pass_at_k(10, 10, 1) == 1.0
    assert pass_at_k(3, 10, 1) == pytest.approx(0.3)
    assert pass_at_k(2, 4, 2) == pytest.approx(1 - 1 / 6)
    assert pass_at_k(6, 10, 5) == 1.0, "five drawn of four failures hold a passing one"
    rng = random.Random(0)
    attempts = [True] * 4 + [False] * 16
    drawn = sum(any(rng.sample(attempts, 3)) for _ in range(20_000)) / 20_000
    assert pass_at_k(4, 20, 3) == pytest.approx(drawn, abs=0.01)
    for passed, n, k in ((1, 3, 4), (4, 3, 1), (-1, 3, 1), (1, 3, 0)):
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(passed, n, k)
