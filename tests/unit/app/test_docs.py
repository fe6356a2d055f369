"""Documentation that is not true is a defect: links resolve, examples run, packages are explained."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lehr.app.cli import COMMANDS, run
from lehr.core.config import load
from lehr.model.checkpoint import save_model
from lehr.model.tiny import tiny_decoder
from lehr.model.tokenizer import ByteTokenizer
from lehr.pipeline.recipe import ControlStage, Recipe, quickstart_recipe

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_exist(page: Path) -> None:
    if page.name == "architecture.md" or "decisions" in page.parts:  # these speak of what is to come, too
        return
    for command in re.findall(r"(?:^    |`)lehr ([a-z]+)", page.read_text(), re.MULTILINE):
        assert command in COMMANDS, f"{page.name} names `lehr {command}`"


def test_every_dependency_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        line for name, lines in project["optional-dependencies"].items() if name != "dev" for line in lines
    ]
    lines = [*project["dependencies"], *extras]
    text = (ROOT / "docs" / "dependencies.md").read_text()
    for name in (re.split(r"[\s<>=!~;\[]", line)[0] for line in lines):
        assert f"| {name}" in text, name


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = (ROOT / "requirements.lock").read_text()
    pinned = {re.sub(r"[_.]", "-", name).lower() for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)}
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    for line in [*project["dependencies"], *extras]:
        name = re.split(r"[\s<>=!~;\[]", line)[0]
        assert re.sub(r"[_.]", "-", name).lower() in pinned, name


def test_the_domain_of_the_documentation_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "domains.md").read_text()
    folder = tmp_path / "domains" / "my" / "sums"
    folder.mkdir(parents=True)
    card = re.search(r'^    id = "my/sums".*?(?=^\S)', text, re.DOTALL | re.MULTILINE)
    source = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert card and source
    (folder / "domain.toml").write_text(re.sub("^    ", "", card[0], flags=re.MULTILINE))
    (folder / "source.py").write_text(source[1])
    monkeypatch.chdir(tmp_path)
    assert run(["domains", "show", "my/sums"]) == 0
    assert "Add two numbers" in capsys.readouterr().out


def test_the_sandbox_example_of_the_documentation_works() -> None:
    text = (ROOT / "docs" / "sandbox.md").read_text()
    source = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert source
    done = subprocess.run([sys.executable, "-c", source[1]], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "ok b'42\\n'" in done.stdout


def test_recipes_resolve_and_the_written_out_quickstart_is_the_quickstart() -> None:
    recipes = {path.stem: load(Recipe, path) for path in sorted((ROOT / "recipes").glob("*.toml"))}
    assert recipes["quickstart"] == quickstart_recipe()
    assert recipes["control"] == quickstart_recipe(control=True)
    assert recipes["tiny"] == quickstart_recipe("tiny")
    assert isinstance(recipes["control"].stages[-1], ControlStage)


def test_the_native_engine_in_code_runs_as_written(tmp_path: Path) -> None:
    page = (ROOT / "docs/engines.md").read_text()
    code = re.findall(r"```python\n(.*?)```", page.partition("## Native, in code")[2], re.DOTALL)[0]
    save_model(tiny_decoder(), tmp_path / "tiny", ByteTokenizer())
    assert code.count('"smollm2-135m"') == 1
    code = code.replace('"smollm2-135m"', repr(str(tmp_path / "tiny")))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert all(f"def {name}" in done.stdout for name in ("median", "mean", "spread"))
