"""What holds for any weights, outcomes and sizes."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lehr.schedule.admission import Admission
from lehr.schedule.base import Outcome
from lehr.schedule.scheduler import PassRateScheduler, SchedulerConfig
from lehr.schedule.weights import with_floor

names = st.sampled_from(["a", "b", "c", "d", "e"])
outcomes = st.builds(
    lambda domain, judged, share, invalid: Outcome(domain, round(judged * share), judged, invalid),
    names,
    st.integers(0, 64),
    st.floats(0, 1),
    st.integers(0, 8),
)
configs = st.builds(
    SchedulerConfig,
    target=st.floats(0.05, 0.95),
    strength=st.floats(1, 50),
    floor=st.floats(0, 1),
    half_life=st.floats(1, 500),
)
sizes = st.dictionaries(names, st.integers(1, 12), min_size=1)


@given(st.dictionaries(names, st.floats(1e-6, 1e6), min_size=1), st.floats(0, 1))
def test_shares_sum_to_one_and_keep_the_floor(raw: dict[str, float], floor: float) -> None:
    shares = with_floor(raw, floor)
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares.values()) >= floor / len(raw) - 1e-12
    for a in raw:
        for b in raw:
            if raw[a] >= raw[b]:
                assert shares[a] >= shares[b] - 1e-9, "the floor never turns the order around"


@settings(deadline=None)
@given(configs, sizes, st.lists(st.one_of(outcomes, st.none()), max_size=150))
def test_r30_every_domain_gets_what_its_shares_add_up_to(
    config: SchedulerConfig, sizes: dict[str, int], story: list[Outcome | None]
) -> None:
    scheduler = PassRateScheduler(config, sizes)
    owed, got = dict.fromkeys(sizes, 0.0), dict.fromkeys(sizes, 0)
    for item in story:
        if item is not None:
            if item.domain in sizes:
                scheduler.record(item)
            continue
        for name, share in scheduler.weights().items():
            owed[name] += share
        got[scheduler.draw().domain] += 1
        for name in sizes:
            assert owed[name] - (len(sizes) - 1) - 1e-6 <= got[name] < owed[name] + 1 + 1e-6


@settings(deadline=None)
@given(
    configs, sizes, st.integers(0, 5), st.lists(outcomes, max_size=20), st.integers(1, 80), st.integers(0, 80)
)
def test_no_task_comes_twice_before_all_came_once_and_a_restore_changes_nothing(
    config: SchedulerConfig, sizes: dict[str, int], seed: int, story: list[Outcome], before: int, after: int
) -> None:
    scheduler = PassRateScheduler(config, sizes, "train", seed)
    for outcome in story:
        if outcome.domain in sizes:
            scheduler.record(outcome)
    drawn = [scheduler.draw() for _ in range(before)]
    restored = PassRateScheduler(config, sizes, "train", seed)
    restored.restore(json.loads(json.dumps(scheduler.state())))
    rest = [scheduler.draw() for _ in range(after)]
    assert [restored.draw() for _ in range(after)] == rest
    for name, size in sizes.items():
        indices = [d.index for d in [*drawn, *rest] if d.domain == name]
        for start in range(0, len(indices), size):
            epoch = indices[start : start + size]
            assert len(set(epoch)) == len(epoch)
            assert len(epoch) < size or set(epoch) == set(range(size))


@given(
    st.integers(0, 4), st.integers(1, 6), st.lists(st.sampled_from(["start", "train", "drop"]), max_size=200)
)
def test_staleness_never_passes_the_bound(bound: int, batch: int, story: list[str]) -> None:
    """Groups carry the version at which they started; none is trained more than ``bound`` versions later."""
    admission, version, started, waiting = Admission(bound, batch), 0, 0, list[int]()
    for word in story:
        if word == "start" and admission.capacity(version, started) > 0:
            started += 1
            waiting.append(version)
        elif word == "train" and len(waiting) >= batch:
            for _ in range(batch):
                assert version - waiting.pop(0) <= bound
            version += 1
        elif word == "drop" and waiting:
            waiting.pop()
            started -= 1
