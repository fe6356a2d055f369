"""Runs one arm and reduces its record to a small JSON file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from studies.asynchrony import rules as _rules  # noqa: F401  registers the verifier
from studies.asynchrony.arms import Arm, Sizes, arm_recipe, digest, start_recipe
from studies.asynchrony.stage import label, measured

from lehr.core.errors import ConfigError
from lehr.ledger.reader import LedgerReader
from lehr.model.checkpoint import save_model
from lehr.model.tiny import tiny_decoder
from lehr.model.tokenizer import ByteTokenizer
from lehr.model.weights import weight_files
from lehr.pipeline.folder import replace_text
from lehr.pipeline.observer import Observer
from lehr.pipeline.recipe import Recipe
from lehr.pipeline.run import start_run
from lehr.pipeline.stages.guard import ALARM

KEPT = (
    "reward", "pass", "entropy", "mismatch_kl", "ess", "ratio_max", "clipped_up", "clipped_down", "grad_norm",
    "staleness", "groups_finished", "no_variance", "replayed", "invalid", "own_tokens",
)  # fmt: skip
"""What is kept of the numbers of a step."""


def stored(data: Path, name: str, seed: int, key: str) -> Mapping[str, Any] | None:
    """Return the result of a run, or None where there is none, or one of another configuration."""
    path = data / f"{name}-{seed}.json"
    if not path.exists():
        return None
    try:
        body: dict[str, Any] = json.loads(path.read_text())
        return body if body["digest"] == key else None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}", expected="a result of this study", hint="Delete the file."
        ) from error


def result_of(sizes: Sizes, arm: Arm, seed: int, data: Path) -> Mapping[str, Any] | None:
    """Return the result of an arm, or None where it has none that began from the start that is recorded."""
    start, run = (
        stored(data, name, seed, digest(sizes, which, seed))
        for name, which in (("start", None), (arm.name, arm))
    )
    if start is None or run is None or run["start"] != start["weights"]:
        return None
    return {**run, "greedy_start": start["greedy"]}


def run_start(sizes: Sizes, seed: int, work: Path, data: Path, observer: Observer) -> Path:
    """Return the checkpoint that all arms of ``seed`` start from; makes it where it is not there."""
    folder, key = work / f"start-{seed}", digest(sizes, None, seed)
    checkpoint = folder / "checkpoints" / "sft"
    known = stored(data, "start", seed, key)
    if known is not None and (checkpoint / "config.json").exists() and known["weights"] == _weights(checkpoint):
        return checkpoint
    shutil.rmtree(folder, ignore_errors=True)
    model = work / f"model-{seed}"
    save_model(tiny_decoder(seed=seed), model, ByteTokenizer())
    recipe = start_recipe(sizes, seed, model)
    begun = time.time()
    with on_one_core():
        start_run(recipe, folder, observer)
    body = _result(folder, recipe, {}, "sft")
    seconds = round(time.time() - begun, 1)
    _store(data, "start", seed, {"digest": key, "weights": _weights(checkpoint), "seconds": seconds, **body})
    return checkpoint


def _weights(checkpoint: Path) -> str:
    found = hashlib.blake2b(digest_size=8)
    for file in weight_files(checkpoint):
        found.update(file.read_bytes())
    return found.hexdigest()


def run_arm(sizes: Sizes, arm: Arm, seed: int, start: Path, work: Path, data: Path, observer: Observer) -> None:
    """Run an arm from ``start`` and store its result. A run that was interrupted begins again."""
    folder = work / f"{arm.name}-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    recipe = arm_recipe(sizes, arm, seed, start)
    begun = time.time()
    with measured(every=sizes.every, lockstep=arm.lockstep):
        start_run(recipe, folder, observer)
    labels = {step: label(step) for step in range(0, sizes.steps + 1, sizes.every)}
    body = _result(folder, recipe, labels, "rl")
    head = {
        "digest": digest(sizes, arm, seed),
        "start": _weights(start),
        "seconds": round(time.time() - begun, 1),
    }
    _store(data, arm.name, seed, {**head, **body})
    shutil.rmtree(folder)


@contextmanager
def on_one_core() -> Generator[None]:
    """Let the block use one core: at this size two threads wait for each other longer than they compute."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _store(data: Path, name: str, seed: int, body: Mapping[str, Any]) -> None:
    data.mkdir(parents=True, exist_ok=True)
    whole = {"name": name, "seed": seed, **body}
    replace_text(data / f"{name}-{seed}.json", json.dumps(whole, separators=(",", ":")) + "\n")


def _result(folder: Path, recipe: Recipe, labels: Mapping[int, str], last: str) -> dict[str, Any]:
    (stage,) = recipe.stages
    reader = LedgerReader(folder / "ledger.sqlite")
    try:
        evaluations = {str(step): _outcomes(reader, name) for step, name in labels.items()}
        greedy = _outcomes(reader, last)
        alarms = Counter(str(event.fields["name"]) for event in reader.events(ALARM))
        states = dict(reader.group_states(stage.name))
    finally:
        reader.close()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["stage"] == stage.name] if stage.type == "rl" else []
    kept = {name: [row.get(f"{stage.name}/{name}") for row in steps] for name in KEPT}
    passes = {domain: [row.get(f"{stage.name}/pass/{domain}") for row in steps] for domain in recipe.domains}
    return {
        "commit": _commit(),
        "machine": {"cores": len(os.sched_getaffinity(0)), "processor": _processor()},
        "stage": stage.model_dump(mode="json", exclude_defaults=True),
        "evaluations": evaluations,
        "greedy": greedy,
        "steps": kept,
        "sampled": passes,
        "staleness": _staleness(steps, stage.name),
        "groups": states,
        "alarms": dict(alarms),
    }


def _outcomes(reader: LedgerReader, name: str) -> dict[str, str]:
    """Return for each domain a character a task, in order: 1 solved, 0 not, - not judged."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    for row in reader.evaluations(name):
        index = int(row.task_id.rsplit("/", 1)[1])
        found[row.domain][index] = "-" if not row.valid else "1" if row.passed else "0"
    return {domain: "".join(tasks[i] for i in sorted(tasks)) for domain, tasks in sorted(found.items())}


def _staleness(steps: list[dict[str, Any]], stage: str) -> dict[str, float]:
    """Return which share of the attempts that were trained on lagged by how many versions."""
    ages: Counter[str] = Counter()
    for row in steps:
        for name, share in row.items():
            if name.startswith(f"{stage}/staleness/"):
                ages[name.rsplit("/", 1)[1]] += share / len(steps)
    return {age: round(share, 4) for age, share in sorted(ages.items(), key=lambda item: int(item[0]))}


def _commit() -> str:
    said = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
    )
    return said.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")
