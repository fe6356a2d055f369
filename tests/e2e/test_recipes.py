"""Every recipe that comes with lehr, from end to end on the tiny model: `make nightly`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lehr.core.config import load, resolve
from lehr.ledger.reader import LedgerReader
from lehr.pipeline.recipe import Recipe
from lehr.pipeline.run import start_run

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))

SMALL: Mapping[str, Any] = {
    "demonstrations": 24, "max_epochs": 6, "patience": 6, "validation_count": 2, "tasks": 6, "samples": 2,
    "epochs": 1, "steps": 2, "groups_per_batch": 2, "group_size": 4, "tasks_per_step": 2, "checkpoint_every": 1,
    "refuse_batches": 3, "teacher": "tiny", "api": {},
}  # fmt: skip
"""What takes the place of a stage's own value where it has that key."""


def small(file: Path) -> Recipe:
    body = load(Recipe, file).model_dump(mode="json", exclude_unset=True)
    body |= {"model": "tiny", "evaluation": {"count": 2}}
    body["domains"] = list(body["domains"])[:2]
    for stage, full in zip(body["stages"], load(Recipe, file).model_dump()["stages"], strict=True):
        stage |= {name: value for name, value in SMALL.items() if name in full}
        stage["train"] = {**stage.get("train", {}), "learning_rate": 3e-3}
    return resolve(Recipe, body)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_runs_to_its_end(file: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    recipe = small(file)
    start_run(recipe, tmp_path / "run")
    reader = LedgerReader(tmp_path / "run" / "ledger.sqlite")
    done = {row.name for row in reader.stages() if row.state == "done"}
    states = {g.state for g in reader.groups()}
    reader.close()
    assert {stage.name for stage in recipe.stages} <= done
    assert states <= {"trained", "dropped"}
    for stage in recipe.stages:
        scores = stage.type == "reward_model"
        kind = transformers.AutoModelForSequenceClassification if scores else transformers.AutoModelForCausalLM
        kind.from_pretrained(tmp_path / "run" / "checkpoints" / stage.name)
