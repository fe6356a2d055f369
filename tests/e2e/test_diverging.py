"""A run that diverges, as a person runs it: noticed, stopped at the last good checkpoint, explained."""

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from lehr.app.cli import run
from lehr.core.episode import Evidence
from lehr.core.task import Gold, Task
from lehr.ledger.reader import LedgerReader
from lehr.pipeline.records import ALARM, ENDED_EARLY
from lehr.verify.base import VERIFIERS, Score

HERE = Path(__file__).parent
STEPS = 8
RECIPE = """
model = "tiny"
domains = ["test/letters"]
domain_paths = ["domains"]
engines = 1
evaluation = {{ count = 2 }}
sandbox = {{ boxes = 2, warm = 0 }}

[[stages]]
type = "rl"
steps = {steps}
groups_per_batch = 2
group_size = 4
staleness_bound = 0
checkpoint_every = 1
{stage}
"""
GROWS = 'group = { scale = "none" }\ntrain = { policy_loss = "none", learning_rate = 1e-4 }'
"""Under this the loss is as large as the rewards."""


class Growing:
    """Pays at most 1 for 40 attempts at training tasks, then up to ``most``: a reward with a wrong unit."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.asked = itertools.count()

    async def __call__(self, task: Task, evidence: Evidence, gold: Gold, boxes: Any) -> Score:
        share = sum("a" <= c <= "m" for c in evidence.answer) / max(1, len(evidence.answer))
        grown = "/train/" in task.id and next(self.asked) >= 40
        return Score(share if grown else share / self.most)


CASES = {
    "entropy_collapse": (
        1.0,
        "alarms = { entropy_fraction = 0.99, entropy_floor = 100.0, entropy_steps = 2 }\n"
        "train = { learning_rate = 0.02 }",
        r"entropy fell to \S+ nats from 5\.\d",
    ),
    "loss_spike": (1e6, GROWS, r"the loss rose to \S+, \S+ being usual"),
    "not_finite": (1e37, GROWS, r"step \d: loss \S+, gradient norm (?:inf|nan)"),
    "overflow": (
        1.0,
        "train = { learning_rate = 1e30 }",
        r"weights of up to \S+ give values that are not finite",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_diverging_run_stops_at_its_last_good_checkpoint_and_says_why(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    most, stage, why = CASES[case]
    VERIFIERS.register(f"growing_{case}", Growing(most))
    monkeypatch.chdir(tmp_path)
    shutil.copytree(HERE / "letters", tmp_path / "domains" / "letters")
    card = next((tmp_path / "domains" / "letters").glob("*.toml"))
    text = card.read_text().replace("early_letters", f"growing_{case}")
    card.write_text(text.replace("pass_at", f"reward_range = [0.0, {most}]\npass_at"))
    (tmp_path / "r.toml").write_text(RECIPE.format(steps=STEPS, stage=stage))
    assert run(["train", "r.toml", "--run", "run"]) == 0
    out = " ".join(capfd.readouterr().out.split())
    reader = LedgerReader(tmp_path / "run" / "ledger.sqlite")
    alarms = [e.fields for e in reader.events(ALARM) if e.fields["fatal"]]
    (ended,) = (str(e.fields["text"]) for e in reader.events(ENDED_EARLY))
    steps, states = len(reader.batches("rl")), reader.group_states("rl")
    reader.close()
    assert alarms[-1]["name"] == ("not_finite" if case == "overflow" else case)
    assert alarms[-1]["step"] == steps < STEPS
    said = rf"note: RL ended after \d of {STEPS} steps: it diverged \({why}.*?The weights are those "
    found = re.search(said + r"(?:of step (\d)|that it started from)", out)
    assert found is not None, out
    assert " ".join(ended.split()) in out
    assert {state.partition(":")[0] for state in states} <= {"trained", "dropped"}
    good = int(found.group(1) or 0)
    assert good == {"entropy_collapse": steps - 2, "overflow": 0}.get(case, steps - 1)
    checkpoints = tmp_path / "run" / "checkpoints"
    result = load_file(checkpoints / "rl" / "model.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in result.values())
    kept = [p for p in checkpoints.rglob("model.safetensors") if p.parent.name != "rl"]
    assert len(kept) == (good > 0)
    for path in kept:
        assert str(good) in path.parent.name
        last = load_file(path)
        assert all(bool((result[name] == last[name]).all()) for name in last)
