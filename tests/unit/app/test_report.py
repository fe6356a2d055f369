from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from lehr.app.report.curves import budgets, read_metrics, series
from lehr.app.report.svg import escaped, running_mean, visible
from lehr.app.report.table import print_summary
from lehr.app.report.write import write_report
from lehr.core.errors import ConfigError
from lehr.evals.stats import wilson
from lehr.ledger.store import Ledger
from lehr.pipeline.folder import RunFolder
from lehr.pipeline.records import ALARM, ENDED_EARLY


def test_summary_counts_only_judged_tasks_and_has_the_promised_shape(made_run) -> None:
    write_report(made_run.path)
    found = json.loads((made_run.path / "summary.json").read_text())
    assert set(found) == {"stages", "paired", "seconds"}
    assert list(found["stages"]) == ["base", "sft", "rl", "sft_more"]
    for stage, passed in made_run.solved.items():
        for domain in made_run.domains:
            low, high = wilson(passed, made_run.tasks)
            assert found["stages"][stage][domain] == {
                "n": made_run.tasks,
                "passed": passed,
                "low": pytest.approx(low, abs=1e-4),
                "high": pytest.approx(high, abs=1e-4),
            }


def test_differences_are_paired_over_the_same_tasks(made_run) -> None:
    summary, _ = write_report(made_run.path)
    assert set(summary.paired) == {"rl_minus_base", "rl_minus_sft", "rl_minus_sft_more"}
    difference = summary.paired["rl_minus_sft"]
    assert difference.n == 2 * made_run.tasks
    assert difference.diff == pytest.approx((16 - 10) / 20)
    assert 0 < difference.low < difference.diff < difference.high
    assert summary.paired_by_domain["rl_minus_sft_more"]["code/functions"].diff == pytest.approx((16 - 11) / 20)


def test_a_ledger_that_contradicts_its_traces_is_refused(made_run) -> None:
    ledger = Ledger.open(made_run.path / "ledger.sqlite")
    ledger.close()
    import sqlite3

    with sqlite3.connect(made_run.path / "ledger.sqlite") as db:
        changed = db.execute("UPDATE evaluations SET passed = 1 WHERE label = 'base' AND task_id LIKE '%/15'")
        assert changed.rowcount > 0
    with pytest.raises(ConfigError, match="trace"):
        write_report(made_run.path)


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_report_needs_no_network_and_runs_no_foreign_script(made_run) -> None:
    _, path = write_report(made_run.path)
    text = path.read_text()
    page = _Page()
    page.feed(text)
    names = [tag for tag, _ in page.tags]
    assert names.count("script") == 1
    assert not {"link", "iframe", "img", "object", "embed", "base", "form"} & set(names)
    for _, attributes in page.tags:
        assert not any(name.startswith("on") for name in attributes)
        assert "src" not in attributes and "href" not in attributes
    assert "default-src &#x27;none&#x27;" in text
    assert not re.search(r"https?://", text)


def test_hostile_model_output_is_shown_as_text(made_run) -> None:
    _, path = write_report(made_run.path)
    text = path.read_text()
    assert "&lt;script&gt;alert(1)" in text
    assert "<script>alert(1)" not in text
    assert "\x1b" not in text and "\u202e" not in text
    assert "\\u{1b}" in text and "\\u{202e}" in text


def test_report_names_causes_and_both_kinds_of_transcript(made_run) -> None:
    _, path = write_report(made_run.path)
    text = path.read_text()
    for expected in ("cut off by the token limit", "not judged: sandbox", "unit_tests: nothing right"):
        assert expected in text
    assert "still failing" in text and ">solved<" in text


def test_escaping_covers_quotes_and_hidden_characters() -> None:
    assert escaped("\"<&>'") == "&quot;&lt;&amp;&gt;&#x27;"
    assert visible("a\nb\tc\x07\u200bd") == "a\nb\tc\\u{7}\\u{200b}d"


def test_metrics_survive_a_cut_line_and_a_repeated_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"t": 1, "stage": "rl", "step": 1, "rl/loss": 1.0}\n'
        '{"t": 2, "stage": "rl", "step": 2, "rl/loss": 2.0}\n'
        '{"t": 3, "stage": "rl", "st\n'
        '{"t": 4, "stage": "rl", "step": 2, "rl/loss": 3.0, "time/training_s": 4}\n'
    )
    lines = read_metrics(path)
    assert series(lines, "rl/loss") == [(1.0, 1.0), (2.0, 3.0)]
    (budget,) = budgets(lines, {"rl": 10.0})
    assert (budget.training_s, budget.idle_s) == (4.0, 6.0)


def test_running_mean_looks_back_only() -> None:
    assert running_mean([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]


def test_tensorboard_reads_what_was_exported(made_run) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    from lehr.app.report.tensorboard import export

    (file,) = export(made_run.path).iterdir()
    events = [event for event in reader.LegacyEventFileLoader(str(file)).Load() if event.summary.value]
    found = {(v.tag, event.step): v.simple_value for event in events for v in event.summary.value}
    assert found["rl/loss", 1] == pytest.approx(0.5)
    assert found["rl/pass/code/functions", 5] == pytest.approx(0.5)


def test_a_stage_that_ended_early_is_noted_everywhere(made_run, capsys: pytest.CaptureFixture[str]) -> None:
    text = "RL ended after 0 of 6 steps: 12 groups in a row taught nothing"
    _, recipe = RunFolder.open(made_run.path)
    ledger = Ledger.open(made_run.path / "ledger.sqlite", digest=recipe.digest())
    for said in ("RL ended after 0 of 6 steps: at first", text):
        ledger.event(ENDED_EARLY, stage="rl", text=said)
    ledger.close()
    summary, page = write_report(made_run.path)
    assert summary.notes == (text,) and text in page.read_text()
    assert json.loads((made_run.path / "summary.json").read_text())["notes"] == [text]
    print_summary(summary, Console(width=200))
    assert f"note: {text}" in capsys.readouterr().out


def test_alarms_are_noted_once_per_kind(made_run) -> None:
    _, recipe = RunFolder.open(made_run.path)
    ledger = Ledger.open(made_run.path / "ledger.sqlite", digest=recipe.digest())
    for step, name, text in (
        (2, "clipped", "many"),
        (3, "clipped", "more"),
        (4, "loss_spike", "the loss rose"),
    ):
        ledger.event(ALARM, stage="rl", step=step, name=name, text=text, metric="m", fatal=False)
    ledger.close()
    summary, page = write_report(made_run.path)
    assert summary.notes == (
        "rl, step 2, the first of 2 such alarms: many",
        "rl, step 4: the loss rose",
    )
    assert summary.notes[0] in page.read_text()
