import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lehr.core.clock import VirtualClock
from lehr.core.errors import ConfigError
from lehr.pipeline.cores import divide
from lehr.pipeline.folder import RunFolder, sweep
from lehr.pipeline.metrics import BusyMeter, MetricsWriter
from lehr.pipeline.recipe import (
    ControlStage,
    Recipe,
    RlStage,
    SandboxConfig,
    SftStage,
    load_recipe,
    quickstart_recipe,
)


def test_cores_are_divided_and_none_is_shared_while_both_work():
    division = divide((0, 1, 2))
    assert division.sampling.cores == division.training.cores == (0, 1, 2)
    assert set(division.shared_sampling.cores) & set(division.shared_training.cores) == set()
    assert division.shared_sampling.threads + division.shared_training.threads == 3


def test_a_single_core_is_shared():
    assert divide((4,)).shared_training.cores == divide((4,)).shared_sampling.cores == (4,)


def test_overlapping_work_counts_once():
    clock = VirtualClock()
    busy = BusyMeter(clock)
    with busy():
        clock.advance(2)
        with busy():
            clock.advance(3)
        assert busy.seconds == 5
    clock.advance(10)
    assert busy.seconds == 5


def test_a_line_that_a_crash_cut_is_not_continued(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"t": 1, "sta')
    writer = MetricsWriter(path)
    writer.write("rl", 3, {"loss": 0.5, "broken": float("nan")})
    writer.close()
    last = json.loads(path.read_text().splitlines()[-1])
    assert (last["stage"], last["step"], last["loss"]) == ("rl", 3, 0.5)
    assert "broken" not in last


def test_a_run_folder_is_written_once_and_refuses_edits(tmp_path: Path):
    recipe = quickstart_recipe("tiny")
    folder = RunFolder.create(tmp_path / "run", recipe)
    with pytest.raises(ConfigError, match="already holds a run"):
        RunFolder.create(tmp_path / "run", recipe)
    opened, again = RunFolder.open(tmp_path / "run")
    assert (again, opened.digest) == (recipe, folder.digest)
    folder.config.write_text(folder.config.read_text().replace('"seed": 0', '"seed": 1'))
    with pytest.raises(ConfigError, match="was edited"):
        RunFolder.open(tmp_path / "run")


def test_a_run_of_an_older_version_opens_under_the_digest_that_it_recorded(tmp_path: Path):
    folder = RunFolder.create(tmp_path / "run", quickstart_recipe("tiny"))
    body = json.loads(folder.config.read_text())
    del body["recipe"]["evaluation"]["base_count"]
    from lehr.core.config import digest_of

    body["digest"] = digest_of(body["recipe"])
    folder.config.write_text(json.dumps(body))
    opened, recipe = RunFolder.open(tmp_path / "run")
    assert opened.digest == body["digest"] != recipe.digest()


def test_published_weights_that_a_killed_run_left_are_removed(tmp_path: Path):
    folder = RunFolder.create(tmp_path / "run", quickstart_recipe("tiny"))
    weights = folder.weights(1000)
    (weights / "left").write_text("x")
    assert folder.weights(1000) == weights
    assert list(weights.iterdir()) == []
    weights.rmdir()


def test_weights_too_large_for_memory_lie_in_the_run(tmp_path: Path):
    folder = RunFolder.create(tmp_path / "run", quickstart_recipe("tiny"))
    assert folder.weights(1 << 60).is_relative_to(tmp_path)


def test_a_control_needs_the_stages_that_it_matches():
    with pytest.raises(ValueError, match="needs reject, rl before it"):
        Recipe(stages=(SftStage(), ControlStage()))
    with pytest.raises(ValueError, match="must be unique"):
        Recipe(stages=(RlStage(name="a"), RlStage(name="a")))


def test_values_without_a_meaning_are_refused_by_name(tmp_path: Path):
    file = tmp_path / "r.toml"
    file.write_bytes(b"\xef\xbb\xbf" + b'[[stages]]\ntype = "sft"\n')
    assert load_recipe(file).stages, "a byte order mark does no harm"
    for override, said in (
        ("stages.0.train.learning_rate=inf", "learning_rate: Input should be a finite number"),
        ("seed=-1", "seed: Input should be greater"),
        (f"seed={1 << 63}", "seed: Input should be less"),
        ('domains=["code/functions","code/functions"]', "domains names code/functions more than once"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_recipe(file, [override])
    with pytest.raises(ConfigError) as caught:
        load_recipe(file, ["stages.0.max_epochs=0"])
    assert "max_epochs" in str(caught.value) and "at least 1 item" not in str(caught.value)


def test_quotas_are_of_domains_that_the_recipe_trains():
    recipe = Recipe(stages=(SftStage(),), sandbox=SandboxConfig(quotas={"code/functions": 2}))
    assert recipe.sandbox.quotas == {"code/functions": 2}
    with pytest.raises(ValueError, match="names code/function, which the recipe does not train: code"):
        Recipe(stages=(SftStage(),), sandbox=SandboxConfig(quotas={"code/function": 2}))
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        SandboxConfig(quotas={"code/functions": 0})


def test_memory_of_a_killed_run_is_found_by_the_next_and_that_of_a_living_one_is_kept(tmp_path: Path):
    left, living = (tmp_path / f"lehr-{os.getuid()}-{name}" for name in ("left", "living"))
    for folder in (left, living):
        folder.mkdir()
        (folder / "weights-1.safetensors").write_bytes(b"x")
    code = "import sys, time; from pathlib import Path; from lehr.pipeline.folder import lock; "
    code += "lock(Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, str(living)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
        sweep(tmp_path)
        assert living.exists() and not left.exists()
        holder.kill()
        holder.wait()
        sweep(tmp_path)
        assert not living.exists()
