"""The learning rate over the steps of a stage."""

import math
from typing import Any

import pytest

from lehr.core.errors import ConfigError
from lehr.pipeline.recipe import ControlStage, RlStage
from lehr.train.base import TrainConfig
from lehr.train.schedule import rate_factor


def factors(count: int, **fields: Any) -> list[float]:
    config = TrainConfig.model_validate(fields)
    return [round(rate_factor(step, config), 6) for step in range(count)]


def test_warm_up_rises_to_the_full_rate_and_stays() -> None:
    assert factors(6, warmup_steps=4) == [0.25, 0.5, 0.75, 1, 1, 1]


def test_linear_reaches_its_end_with_the_last_step_and_keeps_it() -> None:
    found = factors(8, schedule="linear", warmup_steps=2, total_steps=6, final_rate=0.2)
    assert found == [0.5, 1, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]


def test_cosine_is_half_way_down_in_the_middle() -> None:
    found = factors(9, schedule="cosine", total_steps=8)
    expected = [(1 + math.cos(math.pi * (step + 1) / 8)) / 2 for step in range(8)]
    assert found == pytest.approx([*expected, 0], abs=1e-6)
    assert found[3] == 0.5


def test_wsd_is_stable_until_its_last_steps() -> None:
    found = factors(8, schedule="wsd", warmup_steps=1, total_steps=7, decay_steps=2)
    assert found == [1, 1, 1, 1, 1, 0.5, 0, 0]


def test_a_schedule_ends_with_its_stage_where_it_was_not_told_when() -> None:
    config = TrainConfig(schedule="cosine").within(8)
    assert rate_factor(7, config) == pytest.approx(0)
    assert config.within(99).total_steps == 8, "told once"
    assert TrainConfig().within(8).total_steps == 0, "a constant rate needs no end"
    with pytest.raises(ConfigError, match="total_steps"):
        rate_factor(0, TrainConfig(schedule="cosine"))


def test_a_stage_too_short_for_its_schedule_is_refused_before_it_runs() -> None:
    with pytest.raises(ConfigError, match=r"5 warmup_steps and 1 decay_steps.*at most 5"):
        TrainConfig(schedule="linear", warmup_steps=5).within(5)
    with pytest.raises(ValueError, match="at most 4"):
        RlStage(steps=4, train=TrainConfig(schedule="wsd", decay_steps=5))
    RlStage(steps=4, passes=2, train=TrainConfig(schedule="wsd", decay_steps=5))
    with pytest.raises(ValueError, match="decay_steps"):
        TrainConfig(schedule="wsd", total_steps=5)
    with pytest.raises(ValueError, match="by the clock"):
        ControlStage(train=TrainConfig(schedule="cosine"))
