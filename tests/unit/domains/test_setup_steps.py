"""A task's ``setup`` is run: once for all episodes and judges, from its image's declaration, in real boxes."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lehr.core.config import load
from lehr.core.episode import Evidence, Observation, Turn
from lehr.core.errors import ConfigError
from lehr.core.reward import Invalid, Reward, Valid
from lehr.core.task import Gold, Problem, Split, Task
from lehr.core.trace import Completion, Sampling
from lehr.domains.base import DomainCard
from lehr.domains.card import task_of
from lehr.domains.catalogue import Domain
from lehr.domains.environments import ENVIRONMENTS
from lehr.domains.yaml_task import HostSize, load_task
from lehr.model.chat import ChatRenderer
from lehr.model.tokenizer import ByteTokenizer
from lehr.rollout.agent import AgentLoop
from lehr.rollout.group import GroupPlan, GroupRunner
from lehr.sandbox.images import store
from lehr.sandbox.pool import Pool
from lehr.sandbox.setups import SetupFailed
from lehr.verify.compose import judge

LARGE = HostSize(8, 32 << 30, 100 << 30)
IMAGE = """
[base]
files = { "opt/cache/words.py" = "words.py" }

[setup.restore_dependency_cache]
run = ["mkdir deps; cp /opt/cache/words.py deps/", "echo restored >> log"]

[setup.compile_project]
run = [
    "python3 -m compileall -q -b deps src",
    "cd deps && python3 -m zipfile -c ../deps.zip words.pyc && cd .. && rm -r deps",
    "echo ZERO = 0 > kept.py",
    "python3 src/main.pyc > built; echo compiled >> log",
]
timeout = 30

[setup.broken]
run = ["echo compiling; echo 'no such header' >&2; exit 2"]
"""
TASK = """
task_id: use-the-build
instruction: Use what was built.
sandbox:
  image: "build-env:base"
setup: [restore_dependency_cache, compile_project]
files:
  src/main.py: |
    import sys; sys.path.insert(0, "deps.zip")
    import words; print(words.COUNT)
artifacts: [solution.py]
max_turns: 3
reward: [run_unit_tests]
"""
GOLD = Gold(("",), {"entry": "f", "tests": [{"args": [2], "want": 6}, {"args": [3], "want": 9}]})
SOLUTION = (
    "import sys\nsys.path.append('/work/deps.zip')\nimport words, kept\n"
    "def f(x):\n    return x * words.COUNT + kept.ZERO\n"
)


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that boxes can pass, with a task, an image beside it, and a store of images."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        (Path(name) / "images").mkdir()
        (Path(name) / "images" / "build-env.toml").write_text(IMAGE)
        (Path(name) / "images" / "words.py").write_text("COUNT = 3\n")
        (Path(name) / "task.yaml").write_text(TASK)
        monkeypatch.setenv("LEHR_HOME", f"{name}/home")
        yield Path(name)


class Events:
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def record(self, kind: str, /, **fields: Any) -> None:
        self.seen.append({"kind": kind, **fields})

    def steps(self) -> list[str]:
        """Programs that were run as set-up."""
        ran = [event for event in self.seen if event.get("phase") == "setup"]
        return [event["program"] for event in ran if event["kind"] == "sandbox.exec"]


def sh(*lines: str) -> str:
    return "```sh\n" + "\n".join(lines) + "\n```"


async def play(task: Task, pool: Pool, *turns: str) -> tuple[list[Observation], Evidence]:
    episode = await ENVIRONMENTS.get("terminal").open(task, pool)
    try:
        seen = [await episode.step(Turn(text)) for text in turns]
    finally:
        evidence = await episode.close()
    return seen, evidence


def test_set_up_runs_once_for_several_episodes_and_their_judges(folder: Path) -> None:
    events = Events()

    async def run() -> None:
        task = load_task(folder / "task.yaml", host=LARGE)
        assert task.image == f"{folder.resolve()}/images/build-env.toml:base"
        pool = Pool(warm=0, limit=4, recorder=events)
        try:
            write = sh(f"cat > solution.py <<'END'\n{SOLUTION}END", "cat log built; ls")
            plays = [play(task, pool, write, sh("echo spoilt > deps.zip"), "DONE") for _ in range(3)]
            for seen, evidence in await asyncio.gather(*plays):
                said = seen[0].messages[0].content.split()
                assert " ".join(said) == "restored compiled 3 built deps.zip kept.py log solution.py src"
                assert evidence.files == {"solution.py": SOLUTION.encode()}, "artefacts alone"
                reward = await judge(task, evidence, GOLD, pool)
                assert isinstance(reward, Valid) and reward.value == 1.0, (
                    "the judge's set-up is nobody's leavings"
                )
        finally:
            await pool.close()

    asyncio.run(run())
    assert len(events.steps()) == 6, "each command of both steps, once"
    restored = [event["obtained"] for event in events.seen if event.get("program", "").startswith("shell")]
    assert set(restored) == {"snapshot"}


def test_an_episode_without_a_command_ends_in_the_state_after_the_set_up(folder: Path) -> None:
    async def run() -> Evidence:
        task = load_task(folder / "task.yaml", host=LARGE)
        pool = Pool(warm=0)
        try:
            _, evidence = await play(task.model_copy(update={"artifacts": ("log", "gone")}), pool, "DONE")
            return evidence
        finally:
            await pool.close()

    assert asyncio.run(run()).files == {"log": b"restored\ncompiled\n"}


def test_a_step_that_is_not_declared_lists_those_that_are(folder: Path) -> None:
    file = folder / "task.yaml"
    file.write_text(TASK.replace("compile_project]", "compile_projekt]"))
    with pytest.raises(ConfigError, match="no set-up step 'compile_projekt'") as caught:
        load_task(file, host=LARGE)
    assert "restore_dependency_cache, compile_project, broken" in str(caught.value)
    file.write_text(TASK.replace('image: "build-env:base"', "image: host"))
    with pytest.raises(ConfigError, match=r"an image whose file has \[setup.NAME\] tables"):
        load_task(file, host=LARGE)
    file.write_text(TASK.replace("build-env:base", "build-env:fast"))
    with pytest.raises(ConfigError, match=r"declares no image \[fast\]"):
        load_task(file, host=LARGE)


def test_a_step_that_fails_is_no_zero_for_the_judge_either(folder: Path) -> None:
    async def run() -> Reward:
        task = load_task(folder / "task.yaml", host=LARGE).model_copy(update={"setup": ("broken",)})
        pool = Pool(warm=0)
        try:
            with pytest.raises(SetupFailed, match="'broken' failed"):
                await play(task, pool, sh("ls"))
            return await judge(task, Evidence(task.id, "", {"solution.py": SOLUTION.encode()}), GOLD, pool)
        finally:
            await pool.close()

    reward = asyncio.run(run())
    assert isinstance(reward, Invalid) and reward.reason == "sandbox"
    assert "verdict exit, exit code 2" in reward.detail and "no such header" in reward.detail


# --- a domain


class Scripted:
    """An engine that lists the working folder, then is done."""

    tokenizer = ByteTokenizer()

    async def generate(
        self, tokens: Sequence[int], sampling: Sampling, *, session: str = "", timeout_s: float = 600.0
    ) -> Completion:
        done = "compiled" in self.tokenizer.decode([int(t) for t in tokens if t < 256])
        ids = np.array([*self.tokenizer.encode("DONE" if done else sh("cat log"))], np.int32)
        zeros = np.zeros(len(ids), np.float32)
        return Completion(ids, zeros, zeros, zeros + 1, np.zeros(len(ids), np.int32), "eos")


class Logs:
    def problem(self, card: DomainCard, split: Split, index: int) -> Problem:
        task = task_of(card, split, index, system="s", user="u", files={"src/main.py": "print(3)\n"})
        want = {"log": "restored\ncompiled\n"}
        return Problem(task, Gold(("DONE",), {"start": {}, "want": want}))


def run_group(folder: Path, setup: list[str], size: int) -> tuple[list[Reward], Events]:
    (folder / "domain.toml").write_text(
        'id = "own/logs"\ntitle = "t"\ngenerator = "source.py:SOURCE"\nenvironment = "terminal"\n'
        f'image = "build-env:base"\nsetup = {setup}\nreward = ["match_state"]\n'
        "timeout_s = 60\nmax_tokens = 64\nmax_turns = 3\n"
    )
    domain = Domain(load(DomainCard, folder / "domain.toml"), folder)
    domain.__dict__["_source"] = Logs()
    said: list[str] = []
    domain.make_ready(said.append)
    assert said[0] == "building build-env:base" and len(store.kept()) == 1
    events = Events()

    async def run() -> list[Reward]:
        pool = Pool(warm=0, limit=2, recorder=events)
        agent = AgentLoop(Scripted(), ChatRenderer(Scripted.tokenizer), pool, context_tokens=4096)  # type: ignore[arg-type]
        plan = GroupPlan("g", domain, domain.problem("train", 0), size, Sampling(), seed=1)
        try:
            group = await GroupRunner(agent, pool).run(plan)
            return [member.reward for member in group.members]
        finally:
            await pool.close()

    return asyncio.run(run()), events


def test_a_domain_whose_step_is_not_declared_is_refused_before_a_run(folder: Path) -> None:
    with pytest.raises(ConfigError, match="declares no set-up step 'nothing'"):
        run_group(folder, ["nothing"], 1)


def test_attempts_of_a_domain_share_its_set_up(folder: Path) -> None:
    rewards, events = run_group(folder, ["restore_dependency_cache", "compile_project"], 4)
    assert len(events.steps()) == 6
    assert all(isinstance(reward, Valid) for reward in rewards), rewards
    shown = {event["program"] for event in events.seen if event.get("program", "").startswith("shell")}
    assert shown == {"shell: cat log"}


def test_a_failed_set_up_makes_the_attempt_invalid_and_never_a_zero(folder: Path) -> None:
    rewards, _ = run_group(folder, ["restore_dependency_cache", "broken"], 2)
    for reward in rewards:
        assert isinstance(reward, Invalid) and reward.reason == "environment"
        for words in ("'broken' failed", "verdict exit, exit code 2", "compiling | no such header"):
            assert words in reward.detail
