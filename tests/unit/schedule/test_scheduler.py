import json

import pytest

from lehr.core.errors import ConfigError, UnknownName
from lehr.schedule.base import Outcome, Scheduler
from lehr.schedule.scheduler import PassRateScheduler, SchedulerConfig
from lehr.schedule.weights import PassRate, multiplier, with_floor


def make(sizes: dict[str, int], seed: int = 0, **config: object) -> PassRateScheduler:
    return PassRateScheduler(SchedulerConfig.model_validate(config), sizes, "train", seed)


def test_it_is_a_scheduler() -> None:
    scheduler: Scheduler = make({"a": 3})
    assert scheduler.draw().domain == "a"


def test_weights_follow_pass_rates() -> None:
    scheduler = make({"easy": 100, "hard": 100, "fresh": 100})
    assert scheduler.weights() == pytest.approx({"easy": 1 / 3, "hard": 1 / 3, "fresh": 1 / 3})
    scheduler.record(Outcome("easy", 64, 64, 0))
    scheduler.record(Outcome("hard", 0, 64, 0))
    weights = scheduler.weights()
    assert weights["hard"] > weights["fresh"] > weights["easy"]
    assert sum(weights.values()) == pytest.approx(1.0)


def test_a_domain_at_its_own_target_is_neutral() -> None:
    scheduler = make({"a": 10, "b": 10}, targets={"a": 0.9})
    scheduler.record(Outcome("a", 90, 100, 0))
    assert scheduler.weights()["a"] == pytest.approx(0.5)


def test_a_mastered_domain_keeps_its_floor() -> None:
    scheduler = make({f"d{n}": 10 for n in range(4)}, strength=100.0, floor=0.4)
    scheduler.record(Outcome("d0", 1000, 1000, 0))
    for n in range(1, 4):
        scheduler.record(Outcome(f"d{n}", 0, 1000, 0))
    weights = scheduler.weights()
    assert weights["d0"] == pytest.approx(0.1)
    assert "the floor holds it there" in scheduler.why("d0")


def test_r17_infrastructure_failures_never_change_a_pass_rate() -> None:
    scheduler = make({"a": 10, "b": 10})
    scheduler.record(Outcome("a", 3, 8, 0))
    before = dict(scheduler.weights())
    for _ in range(50):
        scheduler.record(Outcome("a", 0, 0, 8, 100.0))
    assert scheduler.weights() == before
    assert "400 attempts could not be judged" in scheduler.why("a")


def test_old_attempts_fade() -> None:
    rate = PassRate()
    rate.add(100, 100, 0, half_life=100)
    rate.add(0, 100, 0, half_life=100)
    assert rate.passed == pytest.approx(50)
    assert rate.rate(0.5, 8) == pytest.approx((50 + 4) / (150 + 8))
    assert rate.attempts == 200


def test_the_multiplier_is_bounded_and_falls() -> None:
    for target in (0.2, 0.5, 0.8):
        values = [multiplier(rate / 20, target, 3.0) for rate in range(21)]
        assert values == sorted(values, reverse=True)
        assert multiplier(target, target, 3.0) == pytest.approx(1.0)
        assert 1 / 3 - 1e-9 <= values[-1] < 1 < values[0] <= 3 + 1e-9


def test_a_floor_of_one_is_an_even_split() -> None:
    assert with_floor({"a": 5.0, "b": 1.0, "c": 0.1}, 1.0) == pytest.approx(
        {"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}
    )


def test_r31_a_small_share_is_not_zero_for_ever() -> None:
    scheduler = make({"large": 1000, "small": 1000}, floor=0.05, strength=1000.0)
    scheduler.record(Outcome("small", 10_000, 10_000, 0))
    scheduler.record(Outcome("large", 0, 10_000, 0))
    share = scheduler.weights()["small"]
    assert share < 0.03, "less than one group in four batches of eight"
    draws = [scheduler.draw().domain for _ in range(400)]
    assert abs(draws.count("small") - 400 * share) <= 1.0
    assert "small" in draws[: int(2 / share)]


def test_r29_an_epochs_edge_goes_on_with_the_next() -> None:
    scheduler = make({"a": 7})
    epochs = [[scheduler.draw().index for _ in range(7)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    at_the_edge = make({"a": 7})
    at_the_edge.restore({**scheduler.state(), "drawn": {"a": 7}})
    assert [at_the_edge.draw().index for _ in range(7)] == epochs[1]


def test_a_restored_scheduler_draws_the_same() -> None:
    first = make({"a": 5, "b": 9, "c": 2}, seed=3)
    for n in range(17):
        draw = first.draw()
        first.record(Outcome(draw.domain, n % 3, 4, n % 2))
    saved = json.loads(json.dumps(first.state()))
    second = make({"a": 5, "b": 9, "c": 2}, seed=3)
    second.restore(saved)
    assert second.weights() == first.weights()
    assert [second.draw() for _ in range(40)] == [first.draw() for _ in range(40)]
    assert second.state() == first.state()


def test_another_seed_draws_other_tasks() -> None:
    orders = {tuple(make({"a": 50}, seed=s).draw().index for _ in range(1)) for s in range(20)}
    assert len(orders) > 5


def test_a_state_of_other_tasks_is_refused() -> None:
    state = make({"a": 5}).state()
    for other in (make({"a": 6}), make({"a": 5, "b": 1}), make({"a": 5}, seed=1)):
        with pytest.raises(ConfigError, match="saved scheduler"):
            other.restore(state)


def test_bad_domains_are_named() -> None:
    with pytest.raises(ConfigError, match="no domain has a task"):
        make({"a": 0})
    with pytest.raises(UnknownName, match="'code'"):
        make({"code": 3}, targets={"cod": 0.5})
    scheduler = make({"code": 3, "empty": 0})
    assert set(scheduler.weights()) == {"code"}
    with pytest.raises(UnknownName):
        scheduler.record(Outcome("doc", 1, 1, 0))
    with pytest.raises(UnknownName):
        scheduler.why("doc")


def test_why_says_rate_target_and_effect() -> None:
    scheduler = make({"a": 3, "b": 3})
    assert "no attempt has been judged yet" in scheduler.why("a")
    scheduler.record(Outcome("a", 0, 100, 0))
    assert scheduler.why("a").startswith(
        "a has 66%: about 4% of its recent attempts pass, below the target of 50%"
    )
    assert "raises it 1.9" in scheduler.why("a")
