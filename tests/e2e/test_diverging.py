"""A run that diverges, in the whole loop: noticed, stopped at the last good checkpoint, explained."""

import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from lehr.ledger.reader import LedgerReader
from lehr.pipeline.observer import Silent
from lehr.pipeline.recipe import EvaluationConfig, Recipe, RlStage, SandboxConfig
from lehr.pipeline.records import ALARM, ENDED_EARLY
from lehr.pipeline.run import start_run
from lehr.train.base import AlarmConfig, TrainConfig

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.mark.slow
def test_a_diverging_run_stops_at_its_last_good_checkpoint_and_says_why(tmp_path: Path) -> None:
    from loop import register

    register()
    stage = RlStage(
        steps=6,
        groups_per_batch=2,
        group_size=4,
        staleness_bound=0,
        checkpoint_every=1,
        alarms=AlarmConfig(entropy_fraction=0.99, entropy_floor=100.0, entropy_steps=2),
        train=TrainConfig(learning_rate=0.02),
    )
    recipe = Recipe(
        model="tiny",
        domains=("test/letters",),
        domain_paths=(str(HERE),),
        stages=(stage,),
        evaluation=EvaluationConfig(count=2),
        sandbox=SandboxConfig(boxes=2, warm=0),
    )
    notes = Notes()
    start_run(recipe, tmp_path / "run", notes)
    reader = LedgerReader(tmp_path / "run" / "ledger.sqlite")
    alarms = [e.fields for e in reader.events(ALARM) if e.fields["name"] == "entropy_collapse"]
    (ended,) = (str(e.fields["text"]) for e in reader.events(ENDED_EARLY))
    trained, states = len(reader.batches("rl")), reader.group_states("rl")
    reader.close()
    assert alarms[-1]["fatal"] and alarms[-1]["step"] == trained < 6
    good = trained - 2
    assert ended.startswith(f"RL ended after {trained} of 6 steps: it diverged (entropy fell to")
    assert ended.endswith(f"The weights are those of step {good}") and ended in notes.notes
    assert {state.partition(":")[0] for state in states} <= {"trained", "dropped"}
    checkpoints = tmp_path / "run" / "checkpoints"
    (kept,) = (p for p in checkpoints.rglob("model.safetensors") if p.parent.name != "rl")
    result, last = load_file(checkpoints / "rl" / "model.safetensors"), load_file(kept)
    assert str(good) in kept.parent.name
    assert all(bool((result[name] == last[name]).all()) for name in last)
