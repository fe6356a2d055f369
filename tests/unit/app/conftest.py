"""A run folder as a real run leaves it, small and made in an instant."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from lehr.core.reward import Invalid, Reward, Valid
from lehr.core.trace import Segment, StopReason, Trace, Usage, Version
from lehr.ledger.blobs import BlobStore
from lehr.ledger.store import Ledger
from lehr.model.tokenizer import ByteTokenizer
from lehr.pipeline.folder import RunFolder
from lehr.pipeline.metrics import MetricsWriter
from lehr.pipeline.recipe import ControlStage, Recipe, RlStage, SftStage
from lehr.rollout.base import Judged
from lehr.wire.codec import encode

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202eevil"


def judged(
    trace_id: str, task_id: str, prompt: str, said: str, reward: Reward, stop: StopReason = "eos"
) -> Judged:
    """Return a judged trace of one turn."""
    tokenizer = ByteTokenizer()
    before, after = tokenizer.encode(prompt), tokenizer.encode(said)
    size = len(before) + len(after)
    own = np.arange(size) >= len(before)
    segment = Segment(
        tokens=np.asarray(before + after, np.int32),
        own=own,
        logprobs=np.where(own, -1.0, 0.0).astype(np.float32),
        raw_logprobs=np.where(own, -1.0, 0.0).astype(np.float32),
        kept_mass=np.ones(size, np.float32),
        versions=np.where(own, Version(1, 1).packed, -1).astype(np.int64),
        turns=np.asarray([len(before)], np.int32),
    )
    usage = Usage(prompt_tokens=len(before), own_tokens=len(after))
    return Judged(Trace(trace_id, task_id, f"g-{trace_id}", 0, (segment,), stop=stop, usage=usage), reward)


@dataclass
class MadeRun:
    """The folder, and how many tasks each stage solved of how many per domain."""

    path: Path
    solved: dict[str, int]
    tasks: int
    domains: tuple[str, ...]


@pytest.fixture
def made_run(tmp_path: Path, pristine_run: MadeRun, monkeypatch: pytest.MonkeyPatch) -> MadeRun:
    """Return a copy of the finished run, free to be changed."""
    monkeypatch.setenv("LEHR_HOME", str(tmp_path / "home"))
    shutil.copytree(pristine_run.path, tmp_path / "run")
    return replace(pristine_run, path=tmp_path / "run")


@pytest.fixture(scope="session")
def pristine_run(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    """Return a finished run: base solves 2 of 20, SFT 10, RL 16, more SFT 11; one task is never judged."""
    tmp_path = tmp_path_factory.mktemp("pristine")
    domains = ("code/functions", "documents/invoices")
    recipe = Recipe(model="tiny", domains=domains, stages=(SftStage(), RlStage(), ControlStage(match=("rl",))))
    folder = RunFolder.create(tmp_path / "run", recipe)
    for stage in recipe.stages:
        folder.checkpoint(stage.name).mkdir()
        ByteTokenizer().save(folder.checkpoint(stage.name))
        (folder.checkpoint(stage.name) / "config.json").write_text("{}")
    blobs = BlobStore(folder.blobs)
    ledger = Ledger.open(folder.ledger, digest=recipe.digest())
    solved = {"base": 2, "sft": 10, "rl": 16, "sft_more": 11}
    for label, count in solved.items():
        if label != "base":
            ledger.begin_stage(label)
            ledger.end_stage(label)
        ledger.begin_stage(f"measure {label}")
        with ledger.together():
            for domain in domains:
                for index in range(21):
                    task_id = f"{domain}@abcd/heldout/{index}"
                    if index == 20:
                        reward: Reward = Invalid("sandbox", "the box died")
                    else:
                        right = index < count
                        reward = Valid(
                            1.0 if right else 0.25, {"unit_tests": 1.0 if right else 0.0}, None, right
                        )
                    trace_id = f"{label}-{domain}-{index}"
                    said = HOSTILE if index == 16 else f"answer {index}"
                    item = judged(
                        trace_id, task_id, "a question", said, reward, "length" if index == 18 else "eos"
                    )
                    ledger.record_evaluation(
                        label=label,
                        domain=domain,
                        task_id=task_id,
                        trace_id=trace_id,
                        passed=isinstance(reward, Valid) and reward.passed,
                        valid=isinstance(reward, Valid),
                        blob=blobs.put(encode(item)),
                    )
        ledger.end_stage(f"measure {label}")
    ledger.close()
    metrics = MetricsWriter(folder.metrics)
    for step in range(1, 6):
        values = {"rl/loss": 0.5 / step, "time/training_s": 2.0, "time/sampling_s": 3.0}
        values |= {f"rl/pass/{domain}": 0.1 * step for domain in domains}
        for kind, size in (
            ("abs", 1e-5),
            ("abs_p50", 9e-6),
            ("abs_p99", 4e-5),
            ("abs_max", 5e-5),
            ("kl", 1e-9),
        ):
            values |= {f"rl/mismatch_{kind}/{domain}": size * step for domain in domains}
        metrics.write("rl", step, values)
    metrics.close()
    return MadeRun(folder.path, solved, 20, domains)
