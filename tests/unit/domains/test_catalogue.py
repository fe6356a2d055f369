from __future__ import annotations

from pathlib import Path

import pytest

from lehr.core.errors import ConfigError, UnknownName
from lehr.domains.card import find_cards
from lehr.domains.catalogue import find_domains, match_domains, open_domain

CARD = """
id = "my/echo"
title = "Echo"
generator = "tasks.py:SOURCE"
reward = ["match_answer { weight: 1.0 }"]
[splits]
train = 4
"""
TASKS = """
from lehr.core.task import Gold, Problem
from lehr.domains.card import task_of


class Source:
    def problem(self, card, split, index):
        task = task_of(card, split, index, system="Repeat.", user=str(index))
        return Problem(task, Gold((str(index),), {"kind": "integer", "answer": str(index)}))


SOURCE = Source()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "echo").mkdir()
    (tmp_path / "echo" / "domain.toml").write_text(CARD)
    (tmp_path / "echo" / "tasks.py").write_text(TASKS)
    return tmp_path


def test_a_users_domain_is_found_below_a_given_path_and_in_domains(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert open_domain("my/echo", [folder]).problem("train", 3).task.messages[-1].content == "3"
    assert open_domain("my/echo", [folder / "echo"]).card.title == "Echo"
    (folder / "domains").mkdir()
    (folder / "echo").rename(folder / "domains" / "echo")
    monkeypatch.chdir(folder)
    assert open_domain("my/echo").problem("train", 0).gold.answer == ("0",)


def test_reading_a_card_runs_no_code(folder: Path) -> None:
    (folder / "echo" / "tasks.py").write_text("raise RuntimeError('loaded')")
    assert "my/echo" in find_domains([folder])


def test_an_unknown_domain_names_near_ones() -> None:
    with pytest.raises(UnknownName, match="code/functions") as caught:
        open_domain("code/function")
    assert "lehr domains list" in str(caught.value)


def test_the_digest_follows_the_content(folder: Path) -> None:
    before = open_domain("my/echo", [folder]).digest
    assert before == open_domain("my/echo", [folder]).digest
    (folder / "echo" / "tasks.py").write_text(TASKS + "\n# changed\n")
    assert before != open_domain("my/echo", [folder]).digest


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("title =", "titel =", "title"),
        ("tasks.py:SOURCE", "tasks.py:SORCE", "SORCE"),
        ("tasks.py:SOURCE", "nowhere.py:SOURCE", "nowhere"),
        ("tasks.py:SOURCE", "no_such_module_x:SOURCE", "no_such_module_x"),
        ("tasks.py:SOURCE", "tasks", "module:object"),
        ('id = "my/echo"', "id = ", "valid TOML"),
    ],
)
def test_a_mistake_in_the_card_is_named(folder: Path, old: str, new: str, said: str) -> None:
    card = folder / "echo" / "domain.toml"
    card.write_text(card.read_text().replace(old, new))
    with pytest.raises(ConfigError, match=said):
        open_domain("my/echo", [folder]).problem("train", 0)


def test_out_of_range_and_missing_paths(folder: Path) -> None:
    domain = open_domain("my/echo", [folder])
    with pytest.raises(ConfigError, match="below 4"):
        domain.problem("train", 4)
    with pytest.raises(ConfigError, match="below 0"):
        domain.problem("heldout", 0)
    with pytest.raises(ConfigError, match="no such folder"):
        find_domains([folder / "nothing"])


def test_two_folders_of_the_same_id_are_refused_and_others_go_on(folder: Path) -> None:
    (folder / "twin").mkdir()
    (folder / "twin" / "domain.toml").write_text(CARD)
    with pytest.raises(ConfigError, match="my/echo") as caught:
        open_domain("my/echo", [folder])
    assert str(folder / "twin") in str(caught.value) and str(folder / "echo") in str(caught.value)
    assert "code/functions" in find_domains([folder]) and "my/echo" not in find_domains([folder])


def test_a_card_that_cannot_be_read_leaves_the_others_usable(folder: Path) -> None:
    for name, text in (
        ("bad", CARD.replace("title =", "titel =")),
        ("worse", CARD.replace("my/echo", "my/worse") + "= ="),
        ("worst", "\x00"),
    ):
        (folder / name).mkdir()
        (folder / name / "domain.toml").write_text(text.replace("my/echo", "my/bad"))
    assert open_domain("my/echo", [folder]).problem("train", 3).gold.answer == ("3",)
    found = find_cards([folder])
    for name, said in (("my/bad", "did you mean 'title'"), ("my/worse", "valid TOML"), ("worst", "valid TOML")):
        assert isinstance(found[name].card, ConfigError)
        with pytest.raises(ConfigError, match=said):
            open_domain(name, [folder])


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("x = 1\nSOURCE = 1/0\n", 2, "ZeroDivisionError: division by zero"),
        ("def broken(:\n    pass\n", 1, "SyntaxError"),
        ("import no_such_module_x\n", 1, "ModuleNotFoundError: No module named 'no_such_module_x'"),
        ("\n\nraise SystemExit(0)\n", 3, "SystemExit: 0"),
        (TASKS.replace("task = task_of", "task = tusk_of"), 8, "NameError: name 'tusk_of'"),
        (
            TASKS.replace("        task = ", "        int('x')\n        task = "),
            8,
            "ValueError: invalid literal",
        ),
    ],
)
def test_code_that_fails_names_domain_file_line_and_error(
    folder: Path, text: str, line: int, said: str
) -> None:
    file = folder / "echo" / "tasks.py"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        open_domain("my/echo", [folder])
    for part in ("'my/echo'", f"{file}, line {line}", said):
        assert part in caught.value.what


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SOURCES = 3\n", "no 'SOURCE'.*'SOURCES'"),
        ("SOURCE = 3\n", "of type int.*problem"),
        ("class SOURCE:\n    def problem(self, card, split, index): ...\n", "the class SOURCE"),
        ("class S:\n    def problem(self, card, split, index): ...\nSOURCE = S()\n", "made None .*Problem"),
    ],
)
def test_a_source_that_makes_no_problems_is_refused(folder: Path, text: str, said: str) -> None:
    (folder / "echo" / "tasks.py").write_text(text)
    with pytest.raises(ConfigError, match=said):
        open_domain("my/echo", [folder])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("match_answer {", "match_anser {", "unknown verifier 'match_anser'.*'match_answer'"),
        ('title = "Echo"', 'title = "Echo"\nenvironment = "terminl"', "unknown environment.*'terminal'"),
    ],
)
def test_a_misspelt_name_is_refused_when_the_domain_is_opened(
    folder: Path, old: str, new: str, said: str
) -> None:
    card = folder / "echo" / "domain.toml"
    card.write_text(card.read_text().replace(old, new))
    with pytest.raises(UnknownName, match=said) as caught:
        open_domain("my/echo", [folder])
    assert str(card) in caught.value.hint


def test_what_hides_a_built_in_domain_is_marked(folder: Path) -> None:
    assert not find_cards([folder])["code/functions"].replaces_built_in
    card = folder / "echo" / "domain.toml"
    card.write_text(card.read_text().replace("my/echo", "code/functions"))
    found = find_cards([folder])["code/functions"]
    assert found.replaces_built_in and found.folder == folder / "echo"


def test_patterns_stand_for_domains() -> None:
    found = match_domains(["reasoning/*", "code/functions", "reasoning/gcd", "my/unknown"])
    assert found.count("reasoning/gcd") == 1 and "reasoning/chain_sum" in found
    assert found[-2:] == ["code/functions", "my/unknown"]
    with pytest.raises(UnknownName, match="reasonning"):
        match_domains(["reasonning/*"])
