"""Preference learning, reward models and PPO on the tiny model, recipe by recipe; a killed PPO run goes on with
the same policy and the same critic.
"""

import asyncio
import json
import signal
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from loop import HERE, register
from test_loop import check_exactly_once, finish, read_until, start
from transformers import AutoModelForSequenceClassification

from lehr.app.commands.eval_ import eval_
from lehr.core.batch import Batch
from lehr.core.config import load
from lehr.core.errors import ConfigError
from lehr.ledger.blobs import BlobStore
from lehr.ledger.reader import LedgerReader
from lehr.model.checkpoint import load_tensors
from lehr.pipeline.evaluate import evaluate_model, evaluate_pairs
from lehr.pipeline.models import TINY, locate_model, trained_model
from lehr.pipeline.observer import Silent
from lehr.pipeline.recipe import Recipe, RlStage
from lehr.pipeline.run import check_recipe, start_run
from lehr.pipeline.stages.ppo import attempts_of, credited
from lehr.rollout.base import Group, Judged
from lehr.train.trainer import LocalTrainer
from lehr.verify.base import VERIFIERS
from lehr.wire.codec import decode

RECIPES = HERE.parents[1] / "recipes"
SMALL = (
    'model="tiny"',
    'domains=["test/letters"]',
    f'domain_paths=["{HERE}"]',
    "evaluation.count=2",
    "engines=1",
    "sandbox.boxes=2",
    "sandbox.warm=0",
    "stages.0.demonstrations=8",
    "stages.0.max_epochs=1",
    "stages.0.validation_count=2",
)
SHORT_RL = ("stages.2.steps=2", "stages.2.groups_per_batch=2", "stages.2.checkpoint_every=1")


@pytest.fixture(autouse=True, scope="module")
def letters() -> None:
    if "early_letters" not in VERIFIERS:
        register()


def run(name: str, folder: Path, *overrides: str) -> Recipe:
    recipe = load(Recipe, RECIPES / f"{name}.toml", [*SMALL, *overrides])
    start_run(recipe, folder)
    return recipe


def rows(folder: Path, stage: str) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["stage"] == stage]


def batches(folder: Path) -> list[list[Group]]:
    """The groups of each recorded batch, from the stored traces."""
    reader, blobs = LedgerReader(folder / "ledger.sqlite"), BlobStore(folder / "blobs")
    traces, found = reader.traces("rl"), []
    for batch in reader.batches("rl"):
        found.append([])
        for group in batch.groups:
            mine = sorted((t for t in traces if t.group_id == group.id), key=lambda t: (t.retry, t.attempt))
            kept = [decode(blobs.get(t.blob), Judged) for t in mine if t.retry == mine[-1].retry]
            found[-1].append(Group(group.id, group.domain, group.task_id, tuple(kept)))
    reader.close()
    return found


def trained(folder: Path) -> list[Group]:
    return [group for batch in batches(folder) for group in batch]


@pytest.mark.slow
def test_dpo_learns_from_pairs_of_its_own_attempts(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run("preference", folder, "stages.1.tasks=12", "stages.1.epochs=4", "stages.1.train.learning_rate=1e-3")
    steps = [row for row in rows(folder, "prefer") if "prefer/loss" in row]
    assert steps[0]["prefer/loss"] == pytest.approx(0.693147, abs=1e-4)  # policy and reference are one
    assert steps[-1]["prefer/loss"] < 0.68 and steps[-1]["prefer/accuracy"] > 0.5
    assert trained_model(folder).name == "prefer"


@pytest.fixture(scope="module")
def ppo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ppo") / "run"
    pairs = f'stages.1.data="{RECIPES / "pairs.jsonl"}"'
    run("reward-model-ppo", folder, pairs, "stages.1.train.learning_rate=3e-3", *SHORT_RL)
    return folder


@pytest.mark.slow
def test_ppo_against_a_reward_model_runs_to_its_end(ppo: Path) -> None:
    steps = rows(ppo, "rl")
    assert [row["step"] for row in steps] == [1, 2]
    assert all("rl/critic/loss" in row and "rl/kl_reference" in row for row in steps)
    saved = load_tensors(ppo / "checkpoints" / "rl-critic")
    begun = load_tensors(ppo / "checkpoints" / "reward_model")
    assert saved.keys() == begun.keys() and not torch.equal(saved["score.weight"], begun["score.weight"])
    assert trained_model(ppo).name == "rl"
    reader = LedgerReader(ppo / "ledger.sqlite")
    (said,) = reader.events("reward_model.accuracy")
    reader.close()
    judged = [member for group in trained(ppo) for member in group.members]
    assert said.fields["held_out"] and said.fields["pairs"] == 4
    assert all(member.reward.value == member.reward.parts["reward_model"] for member in judged)


@pytest.mark.slow
def test_a_reward_model_is_measured_and_is_not_sampled_from(ppo: Path) -> None:
    folder, pairs = ppo / "checkpoints" / "reward_model", str(RECIPES / "pairs.jsonl")
    assert AutoModelForSequenceClassification.from_pretrained(folder).config.num_labels == 1
    told = CliRunner().invoke(eval_, ["--model", str(ppo), "--pairs", pairs, "--json"])
    (row,) = json.loads(told.output)
    assert row["n"] == 40 and row["right"] > 24 and row["low"] < row["right"] / 40 <= row["high"]
    assert evaluate_pairs(folder, Path(pairs)).right == row["right"]
    with pytest.raises(ConfigError, match="gives no score"):
        evaluate_pairs(ppo / "checkpoints" / "rl", Path(pairs))
    with pytest.raises(ConfigError, match="holds a reward model"):
        evaluate_model(str(folder), ["code/functions"])


@pytest.mark.slow
def test_a_weighted_mix_takes_from_both(ppo: Path, tmp_path: Path) -> None:
    scored = ppo / "checkpoints" / "reward_model"
    recipe = load(Recipe, RECIPES / "mixed-reward.toml", [*SMALL, *SHORT_RL])
    body = recipe.model_dump(mode="json")
    body["stages"] = [body["stages"][2] | {"reward_model": {"path": str(scored), "weight": 0.25}}]
    start_run(Recipe.model_validate(body), tmp_path / "run")
    judged = [member for group in trained(tmp_path / "run") for member in group.members]
    assert len(judged) == 16
    for member in judged:
        parts = member.reward.parts
        assert member.reward.value == pytest.approx(0.75 * parts["verified"] + 0.25 * parts["reward_model"])


def test_a_file_of_pairs_that_cannot_be_used_is_named_before_anything_runs(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    long = json.dumps({"prompt": "x" * 3000, "chosen": "a", "rejected": "b"})
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' + long + "\n")
    recipe = load(Recipe, RECIPES / "mixed-reward.toml", [*SMALL, f'stages.1.data="{file}"'])
    with pytest.raises(
        ConfigError, match=r"pairs\.jsonl:2: the prompt has \d+ tokens; expected fewer than 2048"
    ):
        start_run(recipe, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    file.write_text('{"prompt": "a"\n')
    with pytest.raises(ConfigError, match=r"pairs\.jsonl:1: not JSON"):
        check_recipe(recipe)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_r28_a_killed_ppo_run_goes_on_with_the_same_policy_and_critic(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = start(folder, "critic")
    read_until(process, r"stage rl\n(.*\n)*at 3\n")
    process.send_signal(signal.SIGKILL)
    finish(process)
    again = start(folder, "resume")
    output = finish(again)
    assert again.returncode == 0, output[-3000:]
    assert "note resumed rl at step" in output
    check_exactly_once(folder, replays=False)
    policy, critic = asyncio.run(_applied_once(folder))
    for trainer, name in ((policy, "rl"), (critic, "rl-critic")):
        saved = load_tensors(folder / "checkpoints" / name)
        for key, tensor in trainer.master.to_hf().items():
            # the run computes with another number of threads, which rounds sums otherwise
            assert torch.allclose(saved[key], tensor, rtol=0, atol=1e-5), f"{name}: {key}"


async def _applied_once(folder: Path) -> tuple[LocalTrainer, LocalTrainer]:
    """Apply the recorded batches in order, each once, to fresh models."""
    model = locate_model(TINY, Silent())
    recipe = Recipe.model_validate(json.loads((folder / "config.json").read_text())["recipe"])
    (stage,) = recipe.stages
    assert isinstance(stage, RlStage)
    policy = LocalTrainer.open(model, stage.train)
    critic = LocalTrainer.open(model, stage.critic.train, scalar=True)
    reference = LocalTrainer.open(model)
    for number, groups in enumerate(batches(folder), start=1):
        attempts = list(attempts_of(groups))
        flat = [sample for _, samples in attempts for sample in samples]
        samples, _ = credited(attempts, await critic.score(flat), await reference.score(flat), stage.critic)
        for _ in range(2):
            await policy.step(Batch(number, "policy_gradient", samples))
            await critic.step(Batch(number, "value", samples))
    return policy, critic
