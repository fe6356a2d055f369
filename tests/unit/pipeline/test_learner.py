"""What becomes of a batch: a reference, passes, alarms, and a run that diverges."""

import asyncio
import copy
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from lehr.core.batch import Batch
from lehr.core.errors import Diverged, RoleLost
from lehr.core.reward import Valid
from lehr.core.trace import Segment, Trace
from lehr.model.tiny import random_decoder, tiny_config
from lehr.pipeline.beside import over_tokens
from lehr.pipeline.recipe import RlStage
from lehr.pipeline.samples import cut
from lehr.pipeline.stages.guard import Guard
from lehr.pipeline.stages.learner import Learner
from lehr.rollout.base import Group, Judged
from lehr.train.base import AdvantageConfig, AlarmConfig, TrainConfig
from lehr.train.scorer import FrozenModel
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
        segment = replace(segment, raw_logprobs=over_tokens(sample, logprobs))
        trace = Trace(f"{name}{number}", "t", name, number, (segment,))
        return Judged(trace, Valid(float(number % 2)))

    return [Group(f"g{g}", "d", "t", tuple(member(f"g{g}", n) for n in range(4))) for g in range(count)]


def learner(**named: Any) -> tuple[Learner, Recording]:
    train = TrainConfig(learning_rate=1e-2, dtype="float32", **named.pop("train", {}))
    stage = RlStage(train=train, **named)
    trainer = Recording(random_decoder(tiny_config(num_layers=1), seed=1, std=0.1), train)
    found = Learner(trainer, stage)
    if stage.needs_reference:
        found.reference = FrozenModel(copy.deepcopy(trainer.master), train)
    return found, trainer


def guarded(found: Learner, step: int, batch: list[Group]) -> tuple[dict[str, float], str, Notebook]:
    notebook = Notebook()
    guard = Guard(notebook, notebook, "rl", found.stage.alarms)
    return *run(guard.watch(step, found.apply(step, batch))), notebook


def test_the_divergence_from_the_weights_at_the_start_is_measured_and_grows():
    found, trainer = learner(reference=True)
    batch = groups(trainer)
    values = [run(found.apply(step, batch))["reference_kl"] for step in range(1, 4)]
    assert values[0] == pytest.approx(0, abs=1e-6) and 1e-5 < values[1] < values[2]


def test_without_a_reference_nothing_is_measured():
    found, trainer = learner()
    assert "reference_kl" not in run(found.apply(1, groups(trainer)))


@pytest.mark.parametrize("how", [{"reward_kl": 0.5}, {"train": {"loss_kl": 5.0}}])
def test_a_penalty_keeps_the_policy_near_the_reference(how: dict[str, Any]):
    def drift(**named: Any) -> float:
        found, trainer = learner(**{"train": {}, **named})
        metrics: dict[str, float] = {}
        for step in range(6):
            metrics = run(found.apply(step, groups(trainer)))  # on the policy of now
        return metrics["reference_kl"]

    assert drift(**how) < 0.8 * drift(reference=True)


def test_a_reference_is_for_relative_advantages():
    for how in ({"reference": True}, {"reward_kl": 0.1}, {"train": TrainConfig(loss_kl=0.1)}):
        with pytest.raises(ValueError, match=r"critic\.kl"):
            RlStage(advantage="gae", **how)
    with pytest.raises(ValueError, match="table group"):
        RlStage(advantage="gae", group=AdvantageConfig(baseline="leave_one_out"))


def test_decoupled_passes_are_bounded_by_the_weights_before_the_first():
    found, trainer = learner(passes=3, train={"policy_loss": "decoupled_ppo"})
    batch = groups(trainer)
    before = run(trainer.score(cut(batch)))
    run(found.apply(1, batch))
    assert len(trainer.batches) == 3
    for given in trainer.batches:
        for sample, values in zip(given.samples, before, strict=True):
            assert sample.proximal is not None and np.array_equal(sample.proximal[sample.own], values)
    assert not np.allclose(run(trainer.score(cut(batch)))[0], before[0])


def test_a_value_that_is_not_finite_is_told_in_a_sentence():
    found, trainer = learner()
    batch = groups(trainer, 1)
    segment = batch[0].members[0].trace.segments[0]
    segment.raw_logprobs[segment.own] = np.nan
    weights = {n: p.clone() for n, p in trainer.master.named_parameters()}
    metrics, diverged, notebook = guarded(found, 7, batch)
    assert metrics == {} and "step 7: loss nan" in diverged
    (event,) = notebook.events
    assert event["kind"] == "rl.alarm" and event["name"] == "not_finite" and event["fatal"]
    assert "value" not in event, "JSON holds no NaN"
    assert all(torch.equal(p, weights[n]) for n, p in trainer.master.named_parameters())


def test_a_loss_spike_stops_a_run_unless_it_was_told_to_go_on():
    async def step(loss: float) -> dict[str, float]:
        return {"loss": loss}

    for stop in (True, False):
        notebook = Notebook()
        guard = Guard(notebook, notebook, "rl", AlarmConfig(stop=stop))
        found = [run(guard.watch(n, step(loss)))[1] for n, loss in enumerate((0.1, 0.2, 0.1, 50.0))]
        assert found[:3] == ["", "", ""] and found[3].startswith("the loss rose to 50") == stop
        assert [event["name"] for event in notebook.events] == ["loss_spike"]
        assert notebook.notes == ["step 3: the loss rose to 50, 0.1 being usual"]


def test_side_by_side_steps_that_diverge_are_one_divergence_and_other_errors_stay_errors():
    async def both(*errors: Exception) -> dict[str, float]:
        raise ExceptionGroup("steps", errors)

    notebook = Notebook()
    guard = Guard(notebook, notebook, "rl", AlarmConfig())
    assert run(guard.watch(1, both(Diverged("loss nan"), Diverged("value nan")))) == ({}, "loss nan")
    with pytest.raises(ExceptionGroup):
        run(guard.watch(1, both(Diverged("loss nan"), RoleLost("the critic died"))))


def test_what_is_remembered_survives_a_checkpoint():
    found, trainer = learner()
    batch, notebook = groups(trainer), Notebook()
    guard = Guard(notebook, notebook, "rl", found.stage.alarms)
    run(guard.watch(1, found.apply(1, batch)))
    state = json.loads(json.dumps(found.state() | guard.state()))
    again, other = Learner(trainer, found.stage), Guard(notebook, notebook, "rl", found.stage.alarms)
    again.restore(state)
    other.restore(state)
    assert again.state() == found.state() and other.state() == guard.state() and found.state()["scales"]
