"""Alarms: what is unusual rings, what has diverged is fatal, and neither rings on a sound run."""

import json
import math

import numpy as np
import pytest

from lehr.train.alarms import Watch
from lehr.train.base import AlarmConfig

SOUND = {"loss": 0.1, "grad_norm": 1.0, "entropy": 1.0, "ess": 0.98, "mismatch_kl": 0.001, "clipped_up": 0.02}


def watched(*steps: dict[str, float], **config: object) -> list[list[tuple[str, bool]]]:
    watch = Watch(AlarmConfig(**config))
    return [[(alarm.name, alarm.fatal) for alarm in watch.observe(SOUND | step)] for step in steps]


def test_a_sound_run_rings_nothing():
    noise = np.random.default_rng(0)
    steps = [{"loss": noise.normal(0, 0.5), "grad_norm": noise.uniform(0.3, 3)} for _ in range(60)]
    assert watched(*steps) == [[]] * 60


@pytest.mark.parametrize("name", ["loss", "grad_norm", "entropy"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_is_fatal_at_once(name: str, value: float):
    assert watched({name: value}) == [[("not_finite", True)]]


def test_a_loss_spikes_above_the_floor_and_above_what_is_usual():
    assert watched({"loss": 5.0}, {"loss": 5.0}) == [[], []], "what is usual is not known yet"
    assert watched({}, {}, {}, {"loss": -3.5})[-1] == [("loss_spike", True)]
    assert watched({}, {}, {}, {"loss": 2.9})[-1] == []
    assert watched(*[{"loss": 0.4}] * 5, {"loss": 4.1}, {"loss": 0.4})[-2:] == [[("loss_spike", True)], []]
    assert watched(*[{"loss": 0.5}] * 5, {"loss": 4.9})[-1] == [], "below ten times the usual"


def test_entropy_collapses_after_some_steps_in_a_row():
    low, back = {"entropy": 0.01}, {"entropy": 0.5}
    found = watched({}, low, low, back, low, low, low)
    assert found == [[], *[[("entropy_collapse", False)]] * 2, [], *[[("entropy_collapse", False)]] * 2,
                     [("entropy_collapse", True)]]  # fmt: skip
    assert watched({"entropy": 0.06}, *[{"entropy": 0.01}] * 4)[-1] == [], "it was low from the start"


def test_weights_of_a_beginning_collapse_are_no_place_to_go_back_to():
    watch = Watch(AlarmConfig())
    watch.observe(SOUND)
    assert not watch.suspicious
    watch.observe(SOUND | {"entropy": 0.01})
    assert watch.suspicious
    watch.observe(SOUND)
    assert not watch.suspicious


@pytest.mark.parametrize(
    ("metric", "value", "name"),
    [
        ("mismatch_kl", 0.06, "mismatch"),
        ("ess", 0.4, "effective_samples"),
        ("clipped_up", 0.31, "clipped"),
        ("clipped_down", 0.31, "clipped"),
        ("masked_down", 0.51, "masked"),
        ("grad_norm", 10.5, "grad_norm"),
    ],
)
def test_other_alarms_ring_and_stop_nothing(metric: str, value: float, name: str):
    assert watched({}, {}, {}, {metric: value})[-1] == [(name, False)]
    assert watched({}, {}, {}, {metric: value * (0.8 if name != "effective_samples" else 1.3)})[-1] == []


def test_the_reference_rings_only_where_a_threshold_is_given():
    assert watched({"reference_kl": 9.0}) == [[]]
    assert watched({"reference_kl": 9.0}, reference_kl=1.0) == [[("reference_kl", False)]]


def test_a_watch_survives_a_save():
    config = AlarmConfig()
    watch = Watch(config)
    for step in ({}, {"loss": 0.3}, {"entropy": 0.01}, {"entropy": 0.01}):
        watch.observe(SOUND | step)
    again = Watch.restore(config, json.loads(json.dumps(watch.state())))
    assert again.state() == watch.state()
    last = SOUND | {"entropy": 0.01}
    assert [a.fatal for a in again.observe(last)] == [a.fatal for a in watch.observe(last)] == [True]
    assert Watch.restore(config, {}).state() == Watch(config).state()
