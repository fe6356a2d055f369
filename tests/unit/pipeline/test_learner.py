"""What becomes of a batch: a reference, passes, alarms, and a run that diverges."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lehr.core.batch import Batch
from lehr.core.reward import Valid
from lehr.core.trace import Segment, Trace
from lehr.model.tiny import random_decoder, tiny_config
from lehr.pipeline.recipe import RlStage
from lehr.pipeline.samples import cut
from lehr.pipeline.stages.learner import Learner
from lehr.rollout.base import Group, Judged
from lehr.train.base import TrainConfig
from lehr.train.trainer import LocalTrainer


class Notebook:
    """Hears notes and events."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.events: list[dict[str, Any]] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append({"kind": kind, **fields})


class Recording(LocalTrainer):
    """Keeps the batches that it was given."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.batches: list[Batch] = []

    async def step(self, batch: Batch):
        self.batches.append(batch)
        return await super().step(batch)


def run(work: Any) -> Any:
    return asyncio.run(work)


def groups(trainer: LocalTrainer, count: int = 2) -> list[Group]:
    """Groups on the policy: their log-probabilities are the trainer's."""
    random = np.random.default_rng(0)
    own = np.arange(16) >= 8

    def member(name: str, number: int) -> Judged:
        tokens = random.integers(0, 256, 16).astype(np.int32)
        zeros = np.zeros(16, np.float32)
        versions = np.where(own, 1, -1).astype(np.int64)
        segment = Segment(tokens, own, zeros, zeros.copy(), zeros + 1, versions, np.array([8], np.int32))
        (sample,) = cut([Group(name, "d", "t", (Judged(Trace("x", "t", name, 0, (segment,)), Valid(0.0)),))])
        (logprobs,) = run(trainer.score([sample]))
        trace = Trace(f"{name}{number}", "t", name, number, (replace(segment, raw_logprobs=logprobs),))
        return Judged(trace, Valid(float(number % 2)))

    return [Group(f"g{g}", "d", "t", tuple(member(f"g{g}", n) for n in range(4))) for g in range(count)]


def learner(tmp_path: Path, **named: Any) -> tuple[Learner, Recording, Notebook]:
    train = TrainConfig(learning_rate=1e-2, dtype="float32", **named.pop("train", {}))
    stage, notebook = RlStage(train=train, **named), Notebook()
    trainer = Recording(random_decoder(tiny_config(num_layers=1), seed=1, std=0.1), train)
    run(trainer.save(tmp_path / "start"))
    return Learner(trainer, notebook, notebook, stage), trainer, notebook


def test_the_divergence_from_the_weights_at_the_start_is_measured_and_grows(tmp_path: Path):
    found, trainer, notebook = learner(tmp_path, reference=True)
    run(found.begin(tmp_path / "start"))
    held = 4 * sum(p.numel() for p in trainer.master.parameters())
    assert notebook.notes == [f"rl: the reference model takes {held / 2**20:.1f} MiB"]
    batch = groups(trainer)
    values = [run(found.apply(step, batch))[0]["reference_kl"] for step in range(1, 4)]
    assert values[0] == pytest.approx(0, abs=1e-6) and 1e-5 < values[1] < values[2]
    run(found.end())
    with pytest.raises(Exception, match="no reference"):
        run(trainer.score(cut(batch), "reference"))


def test_without_a_reference_none_is_kept(tmp_path: Path):
    found, trainer, notebook = learner(tmp_path)
    run(found.begin(tmp_path / "start"))
    metrics, diverged = run(found.apply(1, groups(trainer)))
    assert "reference_kl" not in metrics and diverged == "" and notebook.notes == []


@pytest.mark.parametrize("how", [{"reward_kl": 0.5}, {"train": {"loss_kl": 5.0}}])
def test_a_penalty_keeps_the_policy_near_the_reference(tmp_path: Path, how: dict[str, Any]):
    def drift(**named: Any) -> float:
        found, trainer, _ = learner(tmp_path, **{"train": {}, **named})
        run(found.begin(tmp_path / "start"))
        metrics: dict[str, float] = {}
        for step in range(6):
            metrics, _ = run(found.apply(step, groups(trainer)))  # on the policy of now
        return metrics["reference_kl"]

    assert drift(**how) < 0.8 * drift(reference=True)


def test_decoupled_passes_are_bounded_by_the_weights_before_the_first(tmp_path: Path):
    found, trainer, _ = learner(tmp_path, passes=3, train={"policy_loss": "decoupled_ppo"})
    batch = groups(trainer)
    before = run(trainer.score(cut(batch)))
    run(found.apply(1, batch))
    assert len(trainer.batches) == 3
    for given in trainer.batches:
        for sample, values in zip(given.samples, before, strict=True):
            assert sample.proximal is not None and np.array_equal(sample.proximal, values)
    assert not np.allclose(run(trainer.score(cut(batch)))[0], before[0])


def test_a_value_that_is_not_finite_is_told_in_a_sentence(tmp_path: Path):
    found, trainer, notebook = learner(tmp_path)
    batch = groups(trainer, 1)
    segment = batch[0].members[0].trace.segments[0]
    segment.raw_logprobs[segment.own] = np.nan
    weights = {n: p.clone() for n, p in trainer.master.named_parameters()}
    metrics, diverged = run(found.apply(7, batch))
    assert metrics == {} and "step 7: loss nan" in diverged
    (event,) = notebook.events
    assert event["kind"] == "rl.alarm" and event["name"] == "not_finite" and event["fatal"]
    assert "value" not in event, "JSON holds no NaN"
    assert all(torch.equal(p, weights[n]) for n, p in trainer.master.named_parameters())


def test_a_loss_spike_stops_a_run_unless_it_was_told_to_go_on(tmp_path: Path):
    for stop in (True, False):
        found, trainer, notebook = learner(tmp_path, advantage={"scale": "none"}, alarms={"stop": stop})
        (group,) = groups(trainer, 1)
        members = [replace(m, reward=Valid(1e4 * (n == 0))) for n, m in enumerate(group.members)]
        segment = members[0].trace.segments[0]
        segment.raw_logprobs[segment.own] -= 0.5
        metrics, diverged = run(found.apply(1, [replace(group, members=tuple(members))]))
        assert metrics["loss"] < -100
        assert diverged.startswith("the loss rose to") == stop
        assert notebook.events[0]["name"] == "loss_spike"


def test_what_it_remembers_survives_a_checkpoint(tmp_path: Path):
    found, trainer, notebook = learner(tmp_path)
    run(found.apply(1, groups(trainer)))
    again = Learner(trainer, notebook, notebook, found.stage)
    again.restore(found.state())
    assert again.state() == found.state() and found.state()["scales"]
