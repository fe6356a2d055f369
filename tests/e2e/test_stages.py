"""Stages in an unusual order, a teacher of every kind, and checkpoints that everything else opens."""

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loop import HERE, register

from lehr.core.batch import Sample
from lehr.core.errors import ConfigError, LehrError
from lehr.ledger.reader import LedgerReader
from lehr.model.fetch import fetch
from lehr.pipeline.evaluate import evaluate_model
from lehr.pipeline.folder import RunFolder
from lehr.pipeline.recipe import (
    DistillStage,
    EvaluationConfig,
    Recipe,
    RejectStage,
    RlStage,
    SandboxConfig,
    SftStage,
    Stage,
)
from lehr.pipeline.run import start_run
from lehr.train.base import TrainConfig
from lehr.train.trainer import LocalTrainer
from lehr.verify.base import VERIFIERS

pytestmark = pytest.mark.timeout(300)  # four stages are run for all tests together

FAST = TrainConfig(learning_rate=3e-3)


def recipe(*stages: Stage) -> Recipe:
    return Recipe(
        model="tiny",
        domains=("test/letters",),
        domain_paths=(str(HERE),),
        stages=stages,
        evaluation=EvaluationConfig(count=4),
        sandbox=SandboxConfig(boxes=2, warm=0),
        engines=1,
    )


def metric(run: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row[name] for row in rows if name in row]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learnt from a file to write early letters."""
    if "early_letters" not in VERIFIERS:
        register()
    folder = tmp_path_factory.mktemp("taught")
    data = folder / "data.jsonl"
    ask = [{"role": "system", "content": "Go."}, {"role": "user", "content": ""}]
    lines = [[ask[0], {**ask[1], "content": f"letters t{i}"}] for i in range(60)]
    said = {"role": "assistant", "content": "abcabcabc"}
    data.write_text("".join(json.dumps({"messages": [*line, said]}) + "\n" for line in lines))
    start_run(recipe(SftStage(data=str(data), max_epochs=12, train=FAST)), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def address(taught: Path) -> Iterator[str]:
    """Where the taught model answers as an OpenAI-compatible server."""
    command = [sys.executable, "-m", "lehr", "serve", str(taught), "--port", "0"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "LEHR_TOKEN": "secret-token"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://[\d.]+:\d+", line):
            break
    else:
        raise AssertionError("the server never said where it listens")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEHR_API_KEY", "secret-token")
        yield found[0] + "/v1"
    process.terminate()
    process.wait(20)
    process.stdout.close()


@pytest.mark.slow
def test_sft_from_a_file_lowers_the_loss_of_what_it_never_saw(taught: Path) -> None:
    losses = metric(taught, "sft/heldout_loss")
    assert len(losses) > 3 and losses[-1] < losses[0] / 2
    reader = LedgerReader(taught / "ledger.sqlite")
    (read,) = reader.events("sft.data")
    reader.close()
    assert (read.fields["trained"], read.fields["held_out"]) == (57, 3)


@pytest.fixture(scope="module")
def chained(taught: Path, address: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chained") / "run"
    rl: dict[str, Any] = {"steps": 2, "groups_per_batch": 2, "group_size": 4, "train": FAST}
    stages = (
        RlStage(name="rl_first", **rl),
        DistillStage(
            name="asked", teacher=f"openai:run@{address}", tasks=12, train=FAST, verified=True, epochs=3
        ),
        DistillStage(
            name="scored",
            teacher=str(taught),
            method="on_policy",
            steps=10,
            tasks_per_step=8,
            train=TrainConfig(learning_rate=1e-2),
        ),
        RejectStage(tasks=4, samples=4, keep="best", near_duplicate=0.8, train=FAST),
        SftStage(demonstrations=4, max_epochs=1, validation_count=2),
        RlStage(**rl),
    )
    start_run(recipe(*stages), folder)
    return folder


@pytest.mark.slow
def test_a_teachers_answers_are_kept_as_data_and_learnt_from(chained: Path) -> None:
    lines = [json.loads(line) for line in (chained / "asked.jsonl").read_text().splitlines()]
    assert 8 <= len(lines) <= 12 and sum(line["passed"] for line in lines) >= 6
    assert all([m["role"] for m in line["messages"]] == ["system", "user", "assistant"] for line in lines)
    losses = metric(chained, "asked/loss")
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_on_policy_the_student_comes_nearer_to_its_teacher(chained: Path) -> None:
    gaps = metric(chained, "scored/reverse_kl")
    assert len(gaps) == 10
    assert sum(gaps[-3:]) < sum(gaps[:3]) * 0.8, gaps


@pytest.mark.slow
def test_every_checkpoint_opens_in_transformers_and_in_eval(chained: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    _, made = RunFolder.open(chained)
    stages = [stage.name for stage in made.stages]
    ids = np.array([257, *b"user\nletters", 258], np.int32)
    own = np.arange(len(ids)) > 0
    zeros = np.zeros(len(ids), np.float32)
    seen: list[float] = []
    for name in stages:
        folder = chained / "checkpoints" / name
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            theirs = peer(torch.from_numpy(ids)[None].long()).logits[0].log_softmax(-1).numpy()
        trainer = LocalTrainer.open(folder, TrainConfig(dtype="float32"))
        (ours,) = asyncio.run(trainer.score([Sample(ids, own, zeros, zeros)]))
        np.testing.assert_allclose(ours, theirs[np.arange(len(ids) - 1), ids[1:]], atol=2e-4)
        seen.append(float(ours.sum()))
    assert len(set(seen)) == len(stages), "every stage changed the weights"
    for name in (stages[0], stages[-1]):
        (row,) = evaluate_model(
            str(chained / "checkpoints" / name), ["test/letters"], count=2, domain_paths=[HERE]
        )
        assert row.n == 2


@pytest.mark.slow
def test_a_teacher_of_another_vocabulary_is_refused_before_anything_starts(tmp_path: Path) -> None:
    try:
        smollm = fetch("smollm2-135m")
    except LehrError as error:
        pytest.skip(str(error))
    stage = DistillStage(teacher=str(smollm), method="on_policy")
    with pytest.raises(
        ConfigError, match=r"vocabularies of .*tiny \(259 tokens\) and of its teacher .* differ: id 0"
    ):
        start_run(recipe(stage), tmp_path / "run")
    assert not (tmp_path / "run").exists()
