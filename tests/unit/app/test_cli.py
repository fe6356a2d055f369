from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lehr.app.cli import COMMANDS, lehr, run
from lehr.app.commands.sandbox import _call
from lehr.app.commands.try_ import _answer
from lehr.core.reward import Valid
from lehr.pipeline.compare import Said, prepare, turns_of
from lehr.pipeline.evaluate import evaluate_model
from lehr.pipeline.observer import Silent

from .conftest import judged

HEAVY = {"torch", "transformers", "ray", "vllm"}


def test_help_answers_in_under_half_a_second() -> None:
    best = float("inf")
    for _ in range(8):
        begun = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "lehr", "--help"], capture_output=True, check=True)
        best = min(best, time.monotonic() - begun)
        if best < 0.5:
            break
    assert b"quickstart" in done.stdout
    assert best < 0.5


@pytest.mark.parametrize("what", ["lehr", "lehr.app.cli", "lehr.core.config", "lehr.pipeline.recipe"])
def test_importing_loads_nothing_heavy(what: str) -> None:
    code = f"import {what}, sys; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_command_imports_and_its_help_says_what_the_list_says(capsys: pytest.CaptureFixture[str]) -> None:
    for name, entry in COMMANDS.items():
        assert run([name, "--help"]) == 0
        assert entry.summary in capsys.readouterr().out


def test_the_bare_program_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == run(["runs"]) == 0
    said = capsys.readouterr()
    assert "quickstart" in said.out and "resume" in said.out and not said.err


def test_a_misspelt_command_names_the_near_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quikstart"]) == 2
    assert "quickstart" in capsys.readouterr().err


def test_a_misspelt_option_exits_2_and_says_where_help_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quickstart", "--modle", "tiny"]) == 2
    error = capsys.readouterr().err
    assert "--model" in error and "lehr quickstart --help" in error


@pytest.mark.parametrize("argv", [["domains", "show", "a", "--index"], ["--debug", "domains", "show", "--in"]])
def test_an_option_without_its_value_names_the_help_of_its_command(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv) == 2
    assert "next: lehr domains show --help" in capsys.readouterr().err


def test_an_unknown_domain_exits_2_with_near_matches_and_the_next_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["domains", "show", "code/function"]) == 2
    error = capsys.readouterr().err
    assert "code/functions" in error and "lehr domains list" in error and "Traceback" not in error


def test_a_misspelt_config_key_exits_2_and_names_the_near_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('modle = "tiny"\n[[stages]]\ntype = "sft"\n')
    assert run(["train", str(recipe)]) == 2
    error = capsys.readouterr().err
    assert "modle" in error and "'model'" in error and "r.toml" in error


def test_a_misspelt_override_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text('[[stages]]\ntype = "sft"\n')
    assert run(["train", str(recipe), "seeds=3"]) == 2
    assert "'seed'" in capsys.readouterr().err


def test_a_missing_model_folder_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "nothing"
    assert run(["quickstart", "--model", str(missing), "--run", str(tmp_path / "run")]) == 2
    assert str(missing) in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_is_not_there_is_said_before_a_run_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.toml"
    for text, named in (
        ('model = "tiny"\ndomains = ["code/function"]', "code/functions"),
        ('model = "tinny"', "tiny"),
        ('model = "tiny"\ndomains = "code/functions"', "a list in brackets"),
    ):
        recipe.write_text(f'{text}\n[[stages]]\ntype = "sft"\n')
        for more in (["--check"], ["--run", str(tmp_path / "run")]):
            assert run(["train", str(recipe), *more]) == 2
            assert named in capsys.readouterr().err
            assert not (tmp_path / "run").exists()


def test_a_folder_that_is_no_run_exits_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["runs", "resume"], ["runs", "show"], ["report"]):
        assert run([*command, str(tmp_path)]) == 2
        assert "not a run folder" in capsys.readouterr().err


def test_json_output_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["domains", "list"], ["models", "list"], ["runs", "list"]):
        assert run([*command, "--json"]) == 0
        assert isinstance(json.loads(capsys.readouterr().out), list)


def test_report_prints_the_table_and_runs_list_finds_the_run(
    made_run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["report", str(made_run.path)]) == 0
    out = capsys.readouterr().out
    assert "code/functions" in out and "80% (58-92)" in out and "RL minus SFT" in out
    assert run(["runs", "list", str(made_run.path.parent), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["state"] == "done" and row["model"] == "tiny"
    assert run(["runs", "show", str(made_run.path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["summary"]["stages"]["rl"]["code/functions"]["passed"] == 16


def test_a_run_shows_how_far_trainer_and_sampler_agree_in_each_domain(
    made_run, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["runs", "show", str(made_run.path), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["agreement"]
    assert [row["domain"] for row in rows] == ["code/functions", "documents/invoices"]
    at_first = {"mean": 1e-5, "median": 9e-6, "99th percentile": 4e-5, "largest": 5e-5, "divergence (k3)": 1e-9}
    assert rows[0] == {"domain": "code/functions", "stage": "rl", **at_first, "all steps": 3e-5}
    assert run(["runs", "show", str(made_run.path)]) == 0
    shown = capsys.readouterr().out
    assert "Trainer against sampler" in shown and "4e-05" in shown
    assert run(["report", str(made_run.path)]) == 0
    page = (made_run.path / "report.html").read_text()
    assert "first step: 99th percentile" in page and ">4e-05<" in page


def test_a_domain_made_from_json_lines_is_listed_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [
        json.dumps({"prompt": f"Ticket {i}: refund {i} euro", "expected": {"amount": i}}) for i in range(30)
    ]
    (tmp_path / "tickets.jsonl").write_text("\n".join(lines))
    assert run(["domains", "new", "my/tickets", "--from-jsonl", "tickets.jsonl"]) == 0
    assert "lehr domains show my/tickets" in capsys.readouterr().out
    assert run(["domains", "list", "--json"]) == 0
    assert "my/tickets" in {row["id"] for row in json.loads(capsys.readouterr().out)}
    assert run(["domains", "show", "my/tickets"]) == 0
    assert "Ticket" in capsys.readouterr().out


def test_one_broken_domain_leaves_the_others_listed_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, extra in (("my/bad", 'titel = "x"\n'), ("code/functions", "")):
        folder = tmp_path / "domains" / name
        folder.mkdir(parents=True)
        (folder / "domain.toml").write_text(
            f'id = "{name}"\ntitle = "t"\ngenerator = "s.py:SOURCE"\nreward = ["match_answer"]\n{extra}'
        )
    assert run(["domains", "list"]) == 0
    said = capsys.readouterr()
    assert "replaces built-in" in said.out and "my/bad" in said.out and "documents/invoices" in said.out
    assert "my/bad cannot be used" in said.err and "titel" in said.err
    assert run(["domains", "list", "--json"]) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert "titel" in rows["my/bad"]["error"] and rows["code/functions"]["note"] == "replaces built-in"
    assert run(["domains", "show", "documents/invoices"]) == 0
    assert run(["domains", "show", "my/bad"]) == 2


def test_a_domain_whose_code_fails_is_said_before_any_engine_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lehr.pipeline.sampler.LocalCluster", None)
    monkeypatch.setattr("lehr.pipeline.run.LocalCluster", None)
    folder = tmp_path / "domains" / "my" / "exc"
    folder.mkdir(parents=True)
    (folder / "domain.toml").write_text(
        'id = "my/exc"\ntitle = "t"\ngenerator = "source.py:SOURCE"\nreward = ["match_answer"]\n'
    )
    (folder / "source.py").write_text("SOURCE = 1/0\n")
    (tmp_path / "r.toml").write_text('model = "tiny"\ndomains = ["my/exc"]\n[[stages]]\ntype = "sft"\n')
    for argv in (
        ["domains", "show", "my/exc"],
        ["eval", "my/exc", "--model", "tiny"],
        ["train", "r.toml", "--run", "run"],
        ["train", "r.toml", "--check"],
    ):
        assert run(argv) == 2, argv
        error = capsys.readouterr().err
        assert "'my/exc'" in error and "source.py, line 1: ZeroDivisionError: division by zero" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("width", [30, 80])
def test_ids_are_never_cut(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    for what, ids in (("domains", ["reasoning/word_sequence_reversal"]), ("models", ["smollm2-135m"])):
        assert run([what, "list"]) == 0
        lines = capsys.readouterr().out.splitlines()
        for name in ids:
            assert any(line.strip().startswith(name) for line in lines)
        if width == 80:
            assert max(map(len, lines)) <= width


def test_try_checks_what_was_asked_before_it_asks_a_model(
    made_run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with sqlite3.connect(made_run.path / "ledger.sqlite") as ledger:
        ledger.execute("UPDATE stages SET state = 'running'")
    for argv, said in (
        ([str(tmp_path / "nothing")], "not a run folder"),
        ([str(made_run.path)], f"lehr runs resume {made_run.path}"),
    ):
        assert run(["try", *argv]) == 2
        error = capsys.readouterr().err
        assert said in error and "asking" not in error
    assert run(["eval", "code/functions", "--model", str(made_run.path)]) == 2
    assert "no trained checkpoint" in capsys.readouterr().err
    assert run(["report", str(made_run.path)]) == 0
    out = capsys.readouterr().out
    assert "try it" not in out and "lehr runs resume" in out


def test_like_puts_the_system_message_of_a_domain_before_a_prompt(made_run) -> None:
    question = prepare(made_run.path, "Write calc(s).", like="code/functions")
    ((task, domain, _),) = question.work
    assert [message.role for message in task.messages] == ["system", "user"] and domain is None
    assert run(["try", str(made_run.path), "code/functions", "--like", "code/functions"]) == 2


def test_try_labels_who_spoke_and_marks_what_was_cut() -> None:
    turns = (("assistant", "```sh\nls\n```"), ("tool", "a.txt"), ("assistant", "DONE"))
    text = _answer(Said("", None, turns, cut=True)).plain
    assert text.splitlines() == [
        *("assistant", "```sh", "ls", "```", "tool output", "a.txt", "assistant", "DONE"),
        "… cut off by the token limit",
    ]
    assert _answer(Said("42")).plain == "42"


def test_turns_are_told_apart_by_whose_tokens_they_are() -> None:
    class Letters:
        def text(self, tokens: list[int]) -> str:
            return bytes(tokens).decode()

    trace = judged("t", "t", "question", "ls", Valid(0.0, {}, None, False)).trace
    tokens = np.frombuffer(b"questionlsa.txtDONE", np.uint8).astype(np.int32)
    own = np.array([False] * 8 + [True] * 2 + [False] * 5 + [True] * 4)
    segment = replace(trace.segments[0], tokens=tokens, own=own, **{
        name: np.zeros(len(tokens), getattr(trace.segments[0], name).dtype)
        for name in ("logprobs", "raw_logprobs", "kept_mass", "versions")
    })  # fmt: skip
    assert list(turns_of(segment, Letters())) == [("assistant", "ls"), ("tool", "a.txt"), ("assistant", "DONE")]


def test_eval_says_how_many_tasks_there_are_and_takes_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []

    class Notes(Silent):
        def note(self, text: str) -> None:
            notes.append(text)

    async def nothing(*args: object) -> list[object]:
        return []

    monkeypatch.setattr("lehr.pipeline.evaluate._measure", nothing)
    rows = evaluate_model("tiny", ["code/*", "documents/invoices"], count=9999, observer=Notes())
    assert [row.domain for row in rows] == ["code/functions", "documents/invoices"]
    assert notes[0] == "code/functions has 512 heldout tasks; all of them are measured, not 9999"


def test_a_recipe_that_comes_with_lehr_is_known_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["train", "tiny", 'domains=["code/functions"]', "stages.2.steps=3", "--check"]) == 0
    recipe = json.loads(capsys.readouterr().out)["recipe"]
    assert recipe["domains"] == ["code/functions"] and recipe["stages"][2]["steps"] == 3
    assert run(["train", "quickstrat", "--check"]) == 2
    assert "quickstart" in capsys.readouterr().err


def test_a_yaml_task_that_is_too_large_names_both_sizes_and_the_switch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "task.yaml"
    file.write_text(
        "task_id: refactor-auth-module\nsandbox:\n  resources: { cpu: 4000, mem: 8Gi, disk: 1Gi }\n"
        "reward:\n  - run_unit_tests { weight: 1.0 }\n  - run_static_checks { weight: 0.3 }\n"
    )
    assert run(["domains", "show", str(file)]) == 2
    error = capsys.readouterr().err
    assert "4000 asked" in error and "here" in error and "--clamp-resources" in error
    assert run(["domains", "show", str(file), "--clamp-resources"]) == 0
    assert "run_static_checks (weight 0.3)" in capsys.readouterr().out
    assert run(["domains", "show", str(file), "--clamp-resources", "--json"]) == 0
    task = json.loads(capsys.readouterr().out)
    assert task["resources"]["cpu"] < 4000
    assert [term["weight"] for term in task["reward"]] == [1.0, 0.3]


def test_a_bad_line_names_its_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "a", "expected": {"x": 1}}\n{"prompt": 3}\n')
    assert run(["domains", "new", "my/bad", "--from-jsonl", str(file), "--into", str(tmp_path / "d")]) == 2
    assert "line 2" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_the_group_lists_every_command_once() -> None:
    assert sorted(COMMANDS) == sorted(set(lehr.list_commands(None)))  # type: ignore[arg-type]


def test_a_missing_bubblewrap_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("lehr.sandbox.bwrap.shutil.which", lambda name, path=None: None)
    assert run(["quickstart", "--model", "tiny", "--run", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "bubblewrap" in error and "apt-get install bubblewrap" in error
    assert not (tmp_path / "run").exists()


def test_a_forbidden_bubblewrap_exits_2_before_any_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    which = shutil.which
    monkeypatch.setattr(
        "lehr.sandbox.bwrap.shutil.which",
        lambda name, path=None: "/bin/false" if name == "bwrap" else which(name, path=path),
    )
    assert run(["quickstart", "--model", "tiny", "--run", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "could not make a box" in error and "Mend it" in error and "Traceback" not in error
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_said_before_work_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("lehr.pipeline.folder.MIN_FREE_BYTES", 1 << 62)
    monkeypatch.setenv("LEHR_HOME", str(tmp_path / "home"))
    assert run(["quickstart", "--model", "tiny", "--run", str(tmp_path / "run")]) == 1
    error = capsys.readouterr().err
    assert "MiB are free" in error and "another disk" in error and "Traceback" not in error


def test_sandbox_run_prints_output_status_and_usage(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run(["sandbox", "run", "--memory", "256M", "--", "python3", "-c", "print(6*7); exit(3)"]) == 3
    out, err = capfdbinary.readouterr()
    assert out == b"42\n"
    assert b"exit 3" in err and b"MiB" in err


def test_sandbox_run_names_the_limit_and_how_to_raise_it(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run(["sandbox", "run", "--timeout", "0.5", "--", "sleep", "30"]) == 124
    assert b"timeout_wall" in capfdbinary.readouterr().err
    assert run(["sandbox", "run", "--memory", "lots", "--", "true"]) == 2
    assert b"512M" in capfdbinary.readouterr().err


def test_a_trace_shows_what_a_model_wrote_as_text() -> None:
    usage = {"wall_s": 0.1, "cpu_s": 0.1, "peak_bytes": 1, "read_bytes": 1, "written_bytes": 1}
    words = {"program": "shell: echo \x1b[2K\x1b]52;c;eA==\x07 \u202ehidden", "detail": "cannot start \x9b31m"}
    shown = _call("sandbox.exec", {"verdict": "oom", "exit_code": None, **usage, **words})
    assert "\\u{1b}[2K" in shown and "\\u{202e}hidden" in shown and "\\u{9b}31m" in shown
    assert all(character.isprintable() or character == "\n" for character in shown)
