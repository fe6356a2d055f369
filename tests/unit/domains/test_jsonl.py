from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lehr.core.episode import Turn
from lehr.core.errors import ConfigError
from lehr.core.reward import Valid
from lehr.domains.catalogue import open_domain
from lehr.domains.jsonl import read_rows
from lehr.domains.making import new_from_jsonl
from lehr.sandbox.pool import Pool
from lehr.verify.compose import judge

ROWS: list[dict[str, Any]] = [
    {
        "prompt": f"Ticket {n}: {n} chairs at {n}.50 for Ann",
        "expected": {"count": n, "price": n + 0.5, "who": "Ann"},
    }
    for n in range(30)
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def test_a_domain_from_json_lines_trains(tmp_path: Path) -> None:
    folder = new_from_jsonl("my/tickets", write(tmp_path / "rows.jsonl", ROWS), tmp_path / "domains").folder
    assert folder == tmp_path / "domains" / "my" / "tickets"
    domain = open_domain("my/tickets", [tmp_path / "domains"])
    assert sum(domain.card.splits.values()) == 30 and min(domain.card.splits.values()) >= 3

    async def run() -> None:
        pool = Pool(warm=0, limit=1)
        for split, size in domain.card.splits.items():
            for index in range(size):
                problem = domain.problem(split, index)
                for text, want in ((problem.gold.answer[0], 1.0), ("{}", 0.0)):
                    episode = await domain.environment().open(problem.task, pool)
                    await episode.step(Turn(text))
                    reward = await judge(
                        problem.task, await episode.close(), problem.gold, pool, terms=domain.card.reward
                    )
                    assert isinstance(reward, Valid) and reward.value == want
        await pool.close()

    asyncio.run(run())


def test_a_field_with_decimals_anywhere_is_decimal_everywhere(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}\u2028", "expected": {"price": n if n % 2 else n + 0.5, "n": n}} for n in range(8)]
    text = "\ufeff" + "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (tmp_path / "rows.jsonl").write_text(text)
    fields = [row.fields for row, _ in read_rows(tmp_path / "rows.jsonl")]
    assert {field["price"]["type"] for field in fields} == {"amount"}
    assert {field["n"]["type"] for field in fields} == {"integer"}


def test_splits_are_disjoint_stable_and_keep_equal_prompts_together(tmp_path: Path) -> None:
    rows = [*ROWS, {**ROWS[3], "answer": json.dumps({"who": "Ann", "price": 3.5, "count": 3})}]
    split = read_rows(write(tmp_path / "rows.jsonl", rows))
    again = read_rows(write(tmp_path / "again.jsonl", rows[::-1]))
    assert {row.prompt: home for row, home in split} == {row.prompt: home for row, home in again}
    assert len({home for row, home in split if row.prompt == ROWS[3]["prompt"]}) == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{not json", "line 5: not JSON"),
        ("[1]", "line 5: not an object"),
        ({"prompt": "a"}, "line 5: `expected`"),
        ({"prompt": " ", "expected": {"a": 1}}, "line 5: `prompt`"),
        ({"prompt": "a", "expected": {}}, "line 5: `expected`"),
        ({"prompt": "a", "expected": {"a": [1]}}, "line 5: expected.*list"),
        ({"prompt": "a", "expected": {"a": 1}, "anwser": "x"}, "anwser"),
        ('{"prompt": "a", "expected": {"a": NaN}}', "line 5: .*finite"),
    ],
)
def test_mistakes_name_the_line_and_write_nothing(tmp_path: Path, line: Any, said: str) -> None:
    file = write(tmp_path / "rows.jsonl", [*ROWS[:4], line, *ROWS[5:]])
    with pytest.raises(ConfigError, match=said):
        new_from_jsonl("my/tickets", file, tmp_path / "domains")
    assert not (tmp_path / "domains").exists()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ('{"count": 4, "price": 4.5}', "line 5: .*wrong: who"),
        ("four chairs", "line 5: .*not one JSON object"),
        ('{"count": 4, "price": 4.5, "who": "Ann", "more": 1}', "line 5: .*not asked for: more"),
    ],
)
def test_an_answer_that_the_verifier_refuses_is_named(tmp_path: Path, answer: str, why: str) -> None:
    file = write(tmp_path / "rows.jsonl", [*ROWS[:4], {**ROWS[4], "answer": answer}, *ROWS[5:]])
    with pytest.raises(ConfigError, match=why):
        new_from_jsonl("my/tickets", file, tmp_path / "domains")
    assert not (tmp_path / "domains").exists()


def test_one_prompt_with_two_results_names_both_lines(tmp_path: Path) -> None:
    twice = {**ROWS[3], "expected": {**ROWS[3]["expected"], "who": "Bob"}}
    file = write(tmp_path / "rows.jsonl", [*ROWS, twice])
    with pytest.raises(ConfigError, match=r"lines 4 and 31 .*different `expected`"):
        new_from_jsonl("my/tickets", file, tmp_path / "domains")
    assert not (tmp_path / "domains").exists()


def test_of_equal_lines_one_is_kept(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", [*ROWS, ROWS[3], "", ROWS[3], ROWS[5]])
    made = new_from_jsonl("my/tickets", file, tmp_path / "domains")
    assert made.repeated == 3 and sum(made.sizes.values()) == 30
    domain = open_domain("my/tickets", [tmp_path / "domains"])
    found = [domain.problem(split, i) for split, size in made.sizes.items() for i in range(size)]
    assert len({problem.task.messages[-1].content for problem in found}) == 30


def test_text_that_only_looks_like_a_date_is_text(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{n}", "expected": {"code": "2024-99-99"}} for n in range(8)]
    new_from_jsonl("my/codes", write(tmp_path / "rows.jsonl", rows), tmp_path / "domains")
    assert {r.fields["code"]["type"] for r, _ in read_rows(tmp_path / "rows.jsonl")} == {"text"}


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ConfigError, match="comes with lehr") as caught:
        new_from_jsonl("code/functions", file, tmp_path / "domains")
    assert "my/functions" in caught.value.hint and not (tmp_path / "domains").exists()
    made = new_from_jsonl("my/tickets", file, tmp_path / "domains")
    made.folder.rename(tmp_path / "domains" / "elsewhere")
    with pytest.raises(ConfigError, match="elsewhere is a domain"):
        new_from_jsonl("my/tickets", file, tmp_path / "domains")


def test_lines_that_went_missing_are_said(tmp_path: Path) -> None:
    made = new_from_jsonl("my/tickets", write(tmp_path / "rows.jsonl", ROWS), tmp_path / "domains")
    write(made.folder / "data.jsonl", ROWS[:12])
    domain = open_domain("my/tickets", [tmp_path / "domains"])
    with pytest.raises(ConfigError, match=r"data.jsonl has \d+ tasks of split 'train'"):
        domain.problem("train", domain.card.splits["train"] - 1)


def test_too_few_rows_a_bad_name_and_an_existing_folder(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ConfigError, match="at least 8"):
        new_from_jsonl("a", write(tmp_path / "few.jsonl", ROWS[:7]), tmp_path)
    for name in ("../up", "Big", "", "/abs"):
        with pytest.raises(ConfigError, match="name"):
            new_from_jsonl(name, file, tmp_path)
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        new_from_jsonl("there", file, tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        new_from_jsonl("b", tmp_path / "nothing.jsonl", tmp_path)
