from __future__ import annotations

from pathlib import Path

import pytest

from lehr.core.errors import ConfigError, UnknownName
from lehr.domains.catalogue import find_domains, open_domain

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


def test_two_folders_of_the_same_id_are_refused(folder: Path) -> None:
    (folder / "twin").mkdir()
    (folder / "twin" / "domain.toml").write_text(CARD)
    with pytest.raises(ConfigError, match="my/echo"):
        find_domains([folder])
