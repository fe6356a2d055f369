from __future__ import annotations

from pathlib import Path

import pytest

from lehr.core.errors import ConfigError, HostUnfit
from lehr.domains.yaml_task import HostSize, load_task

AS_IT_STANDS = """\
task_id: refactor-auth-module
sandbox:
  image: "build-env:base"
  resources: { cpu: 4, mem: 8Gi, disk: 20Gi }
timeout: 600
setup:
  - restore_dependency_cache
  - compile_project
reward:
  - run_unit_tests { weight: 1.0 }
  - run_static_checks { weight: 0.3 }
"""
LARGE = HostSize(8, 32 << 30, 100 << 30)
SMALL = HostSize(2, 4 << 30, 100 << 30)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "task.yaml"
    path.write_text(AS_IT_STANDS)
    return path


def test_the_file_that_operators_know_loads_as_it_stands(file: Path) -> None:
    task = load_task(file, host=LARGE)
    assert task.id == "refactor-auth-module" and task.image == "build-env:base" and task.timeout_s == 600
    assert task.setup == ("restore_dependency_cache", "compile_project")
    assert [(term.verifier, term.weight) for term in task.reward] == [
        ("run_unit_tests", 1.0),
        ("run_static_checks", 0.3),
    ]
    assert (task.resources.cpu, task.resources.memory_bytes, task.resources.disk_bytes) == (
        4,
        8 << 30,
        20 << 30,
    )


@pytest.mark.parametrize(
    "line",
    [
        "run_static_checks: {weight: 0.3}",
        "run_static_checks: { weight: 0.3 }",
        "{run_static_checks: {weight: 0.3}}",
    ],
)
def test_other_ways_to_write_a_term(file: Path, line: str) -> None:
    file.write_text(AS_IT_STANDS.replace("run_static_checks { weight: 0.3 }", line))
    assert load_task(file, host=LARGE).reward[1].weight == 0.3


def test_a_host_that_is_too_small_names_both_sizes_and_the_switch(file: Path) -> None:
    with pytest.raises(HostUnfit) as caught:
        load_task(file, host=SMALL)
    said = str(caught.value)
    assert "cpu: 4 asked, 2 here" in said and "mem: 8Gi asked, 4Gi here" in said and "disk" not in said
    assert "--clamp-resources" in said
    task = load_task(file, host=SMALL, clamp=True)
    assert (task.resources.cpu, task.resources.memory_bytes) == (2, 4 << 30)


def test_the_real_host_is_asked_by_default(file: Path) -> None:
    file.write_text(AS_IT_STANDS.replace("mem: 8Gi", "mem: 8000T"))
    with pytest.raises(HostUnfit, match="mem: "):
        load_task(file)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("timeout:", "timout:", "timeout"),
        ("mem: 8Gi", "mem: lots", "lots"),
        ("weight: 1.0", "weight: -1", "weight"),
        ("task_id: refactor-auth-module", "", "task_id"),
        ("sandbox:", "sandbox: [", "valid YAML"),
        (AS_IT_STANDS, "- a\n", "no task"),
    ],
)
def test_mistakes_are_named(file: Path, old: str, new: str, said: str) -> None:
    file.write_text(AS_IT_STANDS.replace(old, new))
    with pytest.raises(ConfigError, match=said):
        load_task(file, host=LARGE)
    with pytest.raises(ConfigError, match="no such file"):
        load_task(file.parent / "nothing.yaml")
