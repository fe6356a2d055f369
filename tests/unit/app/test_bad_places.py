"""Folders and files that a command cannot use are mistakes, told as such, and no defects."""

from __future__ import annotations

import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from safetensors.torch import save_file

from lehr.app.cli import run
from lehr.app.doctor import machine_checks
from lehr.core.errors import ConfigError
from lehr.model.checkpoint import load_tensors, save_model
from lehr.model.tiny import tiny_decoder
from lehr.model.tokenizer import ByteTokenizer
from lehr.pipeline.folder import RunFolder
from lehr.pipeline.models import trained_model

from .conftest import MadeRun


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe for the tiny model, on a machine that is fit."""
    monkeypatch.setattr("lehr.app.preflight.require_fit_host", lambda *_, **__: None)
    monkeypatch.setenv("LEHR_HOME", str(tmp_path / "home"))
    file = tmp_path / "r.toml"
    file.write_text('model = "tiny"\ndomains = ["code/functions"]\n[[stages]]\ntype = "sft"\n')
    return file


def test_a_folder_is_no_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", str(tmp_path), "--check"]) == 2
    assert f"cannot read {tmp_path}: Is a directory" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_made_is_named(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = recipe.read_text()
    for place in ("/proc/x", str(recipe), str(recipe / "below"), str(recipe.parent / ("x" * 300))):
        assert run(["train", str(recipe), "--run", place]) == 2
        error = capsys.readouterr().err
        assert f"cannot make the run folder {place}" in error and "--run" in error
    assert recipe.read_text() == kept


def test_a_home_that_cannot_be_used_is_named(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for home in ("/proc/x", str(recipe), str(recipe / "below")):
        monkeypatch.setenv("LEHR_HOME", home)
        for command in (
            ["eval", "code/functions", "--model", "tiny", "--n", "2"],
            ["models", "fetch", "smollm2-135m"],
        ):
            assert run(command) == 2
            error = capsys.readouterr().err
            assert home in error and "Set LEHR_HOME" in error
        checks = {check.name: check for check in machine_checks()}
        assert checks["models"].state == "missing" and home in checks["models"].detail


@pytest.mark.parametrize("seconds", ["nan", "inf", "-inf", "86401", "0"])
def test_a_time_limit_is_a_number_of_seconds_up_to_a_day(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["sandbox", "run", "--timeout", seconds, "--", "true"]) == 2
    assert "86400" in capsys.readouterr().err


def test_a_seed_below_zero_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quickstart", "--model", "tiny", "--seed", "-1"]) == 2
    assert "-1" in capsys.readouterr().err


def test_a_model_whose_configuration_is_wrong_is_refused_by_the_check(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert run(["train", str(recipe), "--check", f"model={model}"]) == 2
    assert f"{model / 'config.json'} lacks the key 'model_type'" in capsys.readouterr().err


@pytest.mark.parametrize("what", ["weights missing", "weights cut", "no tokenizer", "backend", "no name"])
def test_what_cannot_work_is_refused_before_a_run_folder_is_made(
    what: str, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m"
    save_model(tiny_decoder(seed=0), model, ByteTokenizer())
    override, said = f"model={model}", str(model)
    if what == "weights missing":
        (model / "model.safetensors").unlink()
    elif what == "weights cut":
        with (model / "model.safetensors").open("r+b") as file:
            file.truncate(30_000)
    elif what == "no tokenizer":
        (model / "tokenizer_config.json").unlink()
    elif what == "backend":
        override, said = "sandbox.backend=dockr", "unknown sandbox 'dockr'"
    else:
        override, said = 'model=""', "unknown model ''"
    assert run(["train", str(recipe), "--run", str(tmp_path / "run"), override]) == 2
    error = capsys.readouterr().err
    assert said in error and "xpected" in error
    assert not (tmp_path / "run").exists()


def test_a_model_in_shards_is_whole_only_with_all_of_them(recipe: Path, tmp_path: Path) -> None:
    model = tmp_path / "m"
    save_model(tiny_decoder(seed=0), model, ByteTokenizer())
    tensors = load_tensors(model)
    (model / "model.safetensors").unlink()
    names = {key: f"part-{index % 2}.safetensors" for index, key in enumerate(tensors)}
    for part in set(names.values()):
        save_file({key: tensors[key] for key in tensors if names[key] == part}, model / part)
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert run(["train", str(recipe), "--check", f"model={model}"]) == 0
    (model / "part-1.safetensors").unlink()
    assert run(["train", str(recipe), "--check", f"model={model}"]) == 2


def test_a_recipe_that_may_not_be_read_or_has_no_possible_name_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", "x" * 300, "--check"]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_a_missing_checkpoint_is_said_and_no_other_model_used(
    recipe: Path, made_run: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = made_run.path / "checkpoints"
    assert trained_model(made_run.path) == checkpoints / "rl"
    for gone in (checkpoints / "rl", checkpoints):
        shutil.rmtree(gone)
        assert run(["eval", "code/functions", "--model", str(made_run.path), "--n", "1"]) == 2
        error = capsys.readouterr().err
        assert "checkpoint of stage 'rl'" in error and "is missing" in error


@pytest.mark.parametrize("state", ["missing", "empty"])
def test_a_run_without_its_ledger_does_not_begin_again(
    state: str, recipe: Path, made_run: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = made_run.path / "ledger.sqlite"
    ledger.unlink()
    if state == "empty":
        ledger.touch()
    for command in (
        ["runs", "resume"], ["runs", "show"], ["report"], ["try"], ["eval", "code/functions", "--model"],
    ):  # fmt: skip
        assert run([*command, str(made_run.path)]) == 2
        error = capsys.readouterr().err
        assert f"{ledger} is {state}" in error and "from a copy" in error and "lehr train" in error
    assert run(["runs", "list", str(made_run.path.parent), "--json"]) == 0
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["unreadable"]
    assert ledger.exists() == (state == "empty") and not (state == "empty" and ledger.stat().st_size)


def test_a_damaged_ledger_is_not_to_be_resumed(
    recipe: Path, made_run: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = made_run.path / "ledger.sqlite"
    ledger.write_bytes(b"no ledger" * 1000)
    for command in (["runs", "resume"], ["runs", "show"], ["eval", "code/functions", "--model"]):
        assert run([*command, str(made_run.path)]) == 1
        error = capsys.readouterr().err
        assert str(ledger) in error and "from a copy" in error and "Resume with" not in error
    assert ledger.read_bytes() == b"no ledger" * 1000


def test_a_ledger_that_cannot_be_opened_says_what_to_do(
    recipe: Path, made_run: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    ledger = made_run.path / "ledger.sqlite"
    ledger.unlink()
    ledger.mkdir()
    assert run(["runs", "resume", str(made_run.path)]) == 2
    error = capsys.readouterr().err
    assert str(ledger) in error and "work on a copy of it" in error


def test_a_damaged_configuration_of_a_run_says_what_to_do(
    made_run: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    (made_run.path / "config.json").write_text("{")
    assert run(["runs", "show", str(made_run.path)]) == 2
    error = capsys.readouterr().err
    assert f"cannot read {made_run.path / 'config.json'}" in error and "from a copy" in error


def test_a_checkpoint_inside_a_stage_is_asked_for_by_name(made_run: MadeRun) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint of stage 'rl'.*missing.*rl-step-0004"):
        RunFolder(made_run.path).require_checkpoint("rl", 4)


def test_a_file_is_no_folder_of_runs(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "list", str(recipe)]) == 2
    assert str(recipe) in capsys.readouterr().err


def test_a_ledger_of_a_newer_lehr_asks_for_an_update(
    recipe: Path, made_run: MadeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    with sqlite3.connect(made_run.path / "ledger.sqlite") as ledger:
        ledger.execute("UPDATE alembic_version SET version_num = '9999'")
    for command in (["runs", "show"], ["report"]):
        assert run([*command, str(made_run.path)]) == 2
        error = capsys.readouterr().err
        assert "9999" in error and "Update lehr" in error and "esume" not in error


def test_a_recipe_with_a_byte_order_mark_is_read(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.write_bytes(b"\xef\xbb\xbf" + recipe.read_bytes())
    assert run(["train", str(recipe), "--check"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"]["model"] == "tiny"
