from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from lehr.core.config import Dtype, load, resolve
from lehr.core.errors import ConfigError
from lehr.pipeline.recipe import Recipe
from lehr.pipeline.run import check_recipe
from lehr.train.base import PolicyLossName

RECIPES = sorted((Path(__file__).parents[3] / "recipes").glob("*.toml"))
RAW = {"model": "tiny", "domains": ["code/functions"], "stages": [{"type": "sft"}, {"type": "rl"}]}


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_our_recipes_can_be_read_and_changed(file: Path) -> None:
    recipe = load(Recipe, file, ["seed=7", "stages.0.batch_size=2"])
    assert recipe.seed == 7 and recipe.model_dump()["stages"][0]["batch_size"] == 2
    assert resolve(Recipe, recipe.model_dump(mode="json")) == recipe


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("seed=-1", r"seed: .*\(got -1\)"),
        ("seed=12345678901234567890123456", r"seed: .*\(got 12345678901234567890123456\)"),
        ("stages.1.steps=100000000000000000000000", r"stages\.1\.steps: .*\(got 1000"),
        ("stages.0.max_epochs=true", r"stages\.0\.max_epochs: .*\(got True\)"),
        ('stages.0.max_epochs="3"', r"stages\.0\.max_epochs: .*\(got '3'\)"),
        ("stages.0.train.learning_rate=inf", r"stages\.0\.train\.learning_rate: .*\(got inf\)"),
        ("stages.0.train.betas=[0.9, 1.5]", r"stages\.0\.train\.betas\.1: .*\(got 1.5\)"),
        ("engine.max_running=4294967296", r"engine\.max_running: .*\(got 4294967296\)"),
        ("engines=5000", r"engines: .*256 \(got 5000\)"),
        ("engine.dtype=int3", r"engine\.dtype: .*'bfloat16' \(got 'int3'\)"),
        ("stages.0.train.policy_loss=x", r"stages\.0\.train\.policy_loss: .*'tis'.* or 'none' \(got 'x'\)"),
        ("stages.0.name=../../x", r"'\.\./\.\./x' cannot be the name of a stage"),
        ('stages.0.name=""', "'' cannot be the name of a stage"),
        ('domains=["code/functions", "code/functions"]', "domains names code/functions more than once"),
    ],
)
def test_a_value_out_of_bounds_is_named_with_its_key(override: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        resolve(Recipe, RAW, [override])
    assert len(str(caught.value).splitlines()) == 1


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"the key 'stages' is missing"):
        resolve(Recipe, {})


def test_names_are_those_that_there_are() -> None:
    """What a configuration accepts is what there is to choose from."""
    from lehr.model.dtype import NAMES
    from lehr.train.losses import POLICY_LOSSES

    assert set(get_args(Dtype)) == {"auto", *NAMES} and set(get_args(PolicyLossName)) == set(POLICY_LOSSES)


def test_a_held_out_split_smaller_than_asked_for_is_said() -> None:
    said: list[str] = []
    check_recipe(resolve(Recipe, RAW, ["evaluation.count=100000"]), said.append)
    (note,) = said
    assert "evaluation.count is 100000" in note and "code/functions has" in note
    check_recipe(resolve(Recipe, RAW, ["evaluation.count=5"]), said.append)
    assert len(said) == 1
