"""The arithmetic of the study: intervals, what is carried on and run next, and the rules of its domains."""

import json
import math
import random
import statistics
from pathlib import Path

import pytest
from studies.asynchrony.__main__ import missing
from studies.asynchrony.arms import LOUD, QUICK, Sizes, arm_recipe, arms, digest
from studies.asynchrony.domains.writing import SIZES, WRITTEN
from studies.asynchrony.rules import RULES
from studies.asynchrony.summary import between_seeds, between_tasks, carried, estimate, over_curve, pass_rate

from lehr.domains.catalogue import open_domain


def run_of(*steps: str) -> dict[str, object]:
    return {"evaluations": {str(number): {"d": tasks} for number, tasks in enumerate(steps)}}


def test_the_interval_over_three_seeds_is_student_s() -> None:
    values = [0.2, 0.25, 0.33]
    found = estimate(values)
    half = 4.302653 * statistics.stdev(values) / math.sqrt(3)
    assert found.mean == pytest.approx(0.26)
    assert found.high - found.mean == pytest.approx(half, rel=1e-3)
    assert found.mean - found.low == pytest.approx(half, rel=1e-3)


def test_fewer_than_three_seeds_have_no_interval() -> None:
    for values in ([0.4], [0.4, 0.4]):
        assert math.isnan(estimate(values).low) and estimate(values).mean == 0.4


def test_what_could_not_be_judged_counts_nowhere() -> None:
    assert pass_rate(run_of("1-0-"), 0) == 0.5


def test_the_start_is_no_part_of_the_curve() -> None:
    assert over_curve(run_of("1111", "1100", "0000")) == 0.25


def test_differences_are_paired_by_seed_and_by_task() -> None:
    control = {0: run_of("00", "01"), 1: run_of("00", "00"), 2: run_of("00", "11")}
    runs = {0: run_of("00", "11"), 1: run_of("00", "10")}
    seeds = between_seeds(runs, control, over_curve)
    assert (seeds.mean, seeds.n) == (0.5, 2)
    tasks = between_tasks(runs, control, 1)
    assert (tasks.diff, tasks.n) == (0.5, 4)


def test_a_run_that_ended_early_keeps_its_last_measurement() -> None:
    measured = {"0": {"d": "01"}, "8": {"d": "11"}, "16": {}, "24": {}}
    assert carried(measured) == {"0": {"d": "01"}, "8": {"d": "11"}, "16": {"d": "11"}, "24": {"d": "11"}}


def test_every_arm_gets_its_first_seed_before_any_its_second_and_finished_runs_are_left_out(
    tmp_path: Path,
) -> None:
    sizes = Sizes()
    sync = arms()[0]
    body = {"digest": digest(sizes, sync, 0), "start": "aa"}
    begun = {"digest": digest(sizes, None, 0), "weights": "aa", "greedy": {}}
    (tmp_path / "sync-0.json").write_text(json.dumps(body))
    (tmp_path / "start-0.json").write_text(json.dumps(begun))
    todo = [(arm.name, seed) for arm, seed in missing(sizes, arms(), tmp_path)]
    assert len(todo) == 3 * len(arms()) - 1 and ("sync", 0) not in todo
    main = [seed for name, seed in todo if name not in ("unscaled", "sync-uncorrected")]
    assert main == sorted(main)
    for other in ({**body, "digest": digest(QUICK, sync, 0)}, {**body, "start": "bb"}):
        (tmp_path / "sync-0.json").write_text(json.dumps(other))
        assert ("sync", 0) in [(arm.name, seed) for arm, seed in missing(sizes, arms(), tmp_path)]


def test_arms_differ_in_what_they_are_about_alone() -> None:
    sizes = Sizes()
    recipes = {arm.name: arm_recipe(sizes, arm, 0, Path("m")).model_dump() for arm in arms()}
    base = recipes["sync"]["stages"][0]

    def changed(name: str) -> set[str]:
        stage = recipes[name]["stages"][0]
        return {key for key in base if stage[key] != base[key]}

    assert changed("async-8") == {"staleness_bound"}
    assert changed("async-8-uncorrected") == {"staleness_bound", "train"}
    assert changed("loud-scaled") == set() and changed("loud-unscaled") == {"group"} == changed("unscaled")
    assert changed("replay") == {"replay"}


def test_a_loud_domain_has_the_same_tasks_and_a_hundredfold_reward() -> None:
    loud = next(arm for arm in arms() if arm.name == "loud-scaled")
    sizes = Sizes()
    paths = [arm_recipe(sizes, arm, 0, Path("m")).domain_paths for arm in (arms()[0], loud)]
    plain, paid = (open_domain(LOUD, path) for path in paths)
    assert paid.card.reward_range == (0.0, 100.0) and plain.card.reward_range == (0.0, 1.0)
    for index in range(20):
        assert plain.problem("heldout", index).task.messages == paid.problem("heldout", index).task.messages
    assert len(sizes.domains) >= 6


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_demonstrations_keep_their_rule_and_rules_refuse_others(name: str) -> None:
    rng = random.Random(name)
    wrong = {"brackets": "())(", "palindrome": "ab", "rising": "ba", "sum": "1+1=3"}[name]
    for size in SIZES:
        answers = {WRITTEN[name][1](rng, size) for _ in range(50)}
        assert len(answers) > 1 and all(RULES[name](answer, size) for answer in answers)
        for refused in (
            wrong,
            "",
            "x" * 40,
            "é" * size,
            "9+9=18" if name == "sum" else next(iter(answers)) * 2,
        ):
            assert not RULES[name](refused, size), refused
