import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from lehr.core.task import Gold, Message, Problem, Resources, RewardTerm, Task, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8Gi", 8 << 30),
        ("8GiB", 8 << 30),
        ("8G", 8 << 30),
        ("20 GiB", 20 << 30),
        ("512M", 512 << 20),
        ("512mi", 512 << 20),
        ("1.5K", 1536),
        ("64", 64),
        ("64B", 64),
        (4096, 4096),
        ("1T", 1 << 40),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "8X", "Gi", "-5M", "8 Gigabytes", "1e9"])
def test_a_size_that_cannot_be_read_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="cannot read the size"):
        parse_size(text)


def test_resources_accept_both_spellings() -> None:
    short = Resources.model_validate({"cpu": 4, "mem": "8Gi", "disk": "20Gi"})
    long = Resources.model_validate({"cpu": 4, "memory_bytes": 8 << 30, "disk_bytes": 20 << 30})
    assert short == long
    assert Resources.model_validate(short.model_dump()) == short
    for bad in ({"cpu": 0}, {"mem": 0}, {"mem": "lots"}, {"memory": "8Gi"}):
        with pytest.raises(ValidationError):
            Resources.model_validate(bad)


TERMS = TypeAdapter(tuple[RewardTerm, ...])


def test_the_yaml_that_operators_write_loads_as_it_stands() -> None:
    text = """
reward:
  - run_unit_tests { weight: 1.0 }
  - run_static_checks { weight: 0.3 }
  - plain
  - named: {weight: 2, gate: true}
  - verifier: spelled_out
    weight: 0.5
  - alone:
"""
    terms = TERMS.validate_python(yaml.safe_load(text)["reward"])
    assert [(t.verifier, t.weight, t.gate) for t in terms] == [
        ("run_unit_tests", 1.0, False),
        ("run_static_checks", 0.3, False),
        ("plain", 1.0, False),
        ("named", 2.0, True),
        ("spelled_out", 0.5, False),
        ("alone", 1.0, False),
    ]
    assert TERMS.validate_python([t.model_dump() for t in terms]) == terms


@pytest.mark.parametrize(
    "term", [{"a": {"weight": 0}}, {"a": {"wieght": 1}}, {"verifier": "a", "weight": -1}, 3]
)
def test_a_wrong_term_is_refused(term: object) -> None:
    with pytest.raises(ValidationError):
        TERMS.validate_python([term])


def a_task(**more: object) -> Task:
    return Task.model_validate(
        {"id": "d@1/train/0", "domain": "d", "messages": [{"role": "user", "content": "x"}], **more}
    )


def test_a_task_is_frozen_hashable_and_comes_back_from_json() -> None:
    task = a_task(resources={"mem": "1Gi"}, reward=["a { weight: 2 }"], files={"in.txt": "1"})
    assert Task.model_validate_json(task.model_dump_json()) == task
    assert hash(task) == hash(a_task())
    with pytest.raises(ValidationError):
        task.domain = "e"  # type: ignore[misc]


@pytest.mark.parametrize(
    "more", [{"messages": []}, {"timeout_s": 0}, {"max_turns": 0}, {"max_tokens": 0}, {"gold": "42"}]
)
def test_a_wrong_task_is_refused(more: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        a_task(**more)


def test_the_gold_answer_shows_in_no_log() -> None:
    problem = Problem(a_task(), Gold(("the answer is 42",), {"tests": "assert 42"}))
    assert "42" not in f"{problem} {problem!r} {problem.gold}"
    assert "42" not in problem.task.model_dump_json()


def test_messages_know_their_roles() -> None:
    with pytest.raises(ValidationError):
        Message(role="god", content="")  # type: ignore[arg-type]
