"""What is worth a second step, how likely it is drawn, and what undoes that."""

import random
from collections import Counter

import numpy as np
import pytest

from lehr.core.reward import Valid
from lehr.core.trace import Trace
from lehr.rollout.base import Group, Judged
from lehr.rollout.replay import ReplayConfig, ReplayStore, inclusion, systematic


def group(name: str, *values: float, domain: str = "hard") -> Group:
    members = tuple(
        Judged(Trace(f"{name}-{i}", "t", name, i, ()), Valid(value, passed=value >= 1))
        for i, value in enumerate(values)
    )
    return Group(name, domain, "t", members)


def store(**fields: float) -> ReplayStore:
    return ReplayStore(ReplayConfig.model_validate(fields), above_the_mean)


def above_the_mean(of: Group) -> list[float]:
    values = [m.reward.value for m in of.valid if isinstance(m.reward, Valid)]
    return [value - sum(values) / len(values) for value in values]


def drawn(store_: ReplayStore, step: int, seed: object = 0, **rates: float) -> list[str]:
    return [d.entry.trace_id for d in store_.draw(step, rates or {"hard": 0.1}, str(seed))]


def test_only_successes_that_beat_their_group_in_a_domain_that_rarely_succeeds() -> None:
    kept = store(per_step=9)
    kept.offer(group("a", 1, 0, 0, 0.9), 1)
    kept.offer(group("b", 1, 1, 1), 1)
    kept.offer(group("c", 1, 0, domain="easy"), 1)
    assert drawn(kept, 2, hard=0.1, easy=0.9) == ["a-0"]
    assert drawn(kept, 2, hard=0.4, easy=0.1) == ["c-0"]


def test_a_trace_is_replayed_no_more_often_and_no_later_than_agreed() -> None:
    kept = store(per_step=1, max_uses=2, max_age=3)
    kept.offer(group("a", 1, 0), 5)
    assert drawn(kept, 6) == drawn(kept, 6) == ["a-0"], "drawing alone counts as no use"
    kept.used(["a-0"])
    assert drawn(kept, 8) == ["a-0"]
    kept.used(["a-0"])
    assert drawn(kept, 8) == []
    kept.offer(group("b", 1, 0), 5)
    assert drawn(kept, 9) == [], "three versions later is the last time"


def test_the_least_valuable_of_a_full_domain_leaves_and_no_other_domains() -> None:
    kept = store(per_domain=2, per_step=9)
    kept.offer(group("x", 1, 0, domain="other"), 1)
    kept.offer(group("half", 1, 1, 0, 0), 1)
    kept.offer(group("rare", 1, 0, 0, 0), 1)
    assert len(kept) == 3 and "rare-0" in kept and "x-0" in kept
    assert sum(f"half-{i}" in kept for i in range(2)) == 1


def test_the_state_is_the_store() -> None:
    kept = store(per_step=2)
    for number in range(5):
        kept.offer(group(f"g{number}", 1, 0, *([0] * number)), number)
    kept.used(["g3-0"])
    again = store(per_step=2)
    again.restore(kept.state())
    assert [drawn(kept, s, s) for s in range(4, 9)] == [drawn(again, s, s) for s in range(4, 9)]
    assert again.state() == kept.state()


def test_rare_successes_are_drawn_as_much_oftener_as_they_are_worth() -> None:
    source = random.Random(1)
    chances = inclusion([1, 2, 3, 4], 2)
    np.testing.assert_allclose(chances, [0.2, 0.4, 0.6, 0.8])
    counts: Counter[int] = Counter()
    for _ in range(4000):
        found = systematic(chances, source)
        assert len(found) == len(set(found)) == 2
        counts.update(found)
    np.testing.assert_allclose([counts[i] / 4000 for i in range(4)], chances, atol=0.03)
    assert inclusion([100, 1, 1], 2) == pytest.approx([1, 0.5, 0.5]), "none is certain twice"
    assert inclusion([], 0) == [] and inclusion([3], 1) == [1.0]


def test_the_weight_undoes_the_uneven_drawing() -> None:
    """On average a replay weighs every entry as an even draw would, however unevenly it draws."""
    kept = store(per_step=2, max_uses=10**6)
    for number in range(6):
        kept.offer(group(f"g{number}", 1, *([0] * (number + 1))), 1)
    total: Counter[str] = Counter()
    for seed in range(4000):
        for one in kept.draw(2, {"hard": 0.1}, str(seed)):
            total[one.entry.trace_id] += one.weight
    np.testing.assert_allclose([total[f"g{n}-0"] / 4000 for n in range(6)], 2 / 6, atol=0.03)
    uneven = store(per_step=2, max_uses=10**6, correction=0)
    uneven.restore(kept.state())
    assert {one.weight for one in uneven.draw(2, {"hard": 0.1}, "s")} == {1.0}
