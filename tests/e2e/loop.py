"""Runs or resumes a small run in a process of its own: loop.py FOLDER new|critic|resume STEPS."""

import sys
from pathlib import Path
from typing import Any

from lehr.core.episode import Evidence
from lehr.core.task import Gold, Task
from lehr.pipeline.recipe import EvaluationConfig, Recipe, RejectStage, RlStage, SandboxConfig, SftStage
from lehr.pipeline.run import resume_run, start_run
from lehr.pipeline.stages.preferences import CriticConfig
from lehr.pipeline.stages.settings import LengthCurriculum
from lehr.rollout.replay import ReplayConfig
from lehr.train.base import TrainConfig
from lehr.verify.base import VERIFIERS, Score

HERE = Path(__file__).parent


class EarlyLetters:
    """Pays the share of characters between a and m: graded, cheap, and within reach of a random model."""

    async def __call__(self, task: Task, evidence: Evidence, gold: Gold, boxes: Any) -> Score:
        text = evidence.answer
        return Score(sum("a" <= c <= "m" for c in text) / max(1, len(text)))


def recipe(*, steps: int = 6, bound: int = 1) -> Recipe:
    return Recipe(
        model="tiny",
        domains=("test/letters",),
        domain_paths=(str(HERE),),
        stages=(
            SftStage(demonstrations=8, max_epochs=1, validation_count=2, train=TrainConfig(learning_rate=1e-3)),
            RejectStage(tasks=4, samples=4, train=TrainConfig(learning_rate=1e-3)),
            RlStage(
                steps=steps,
                groups_per_batch=2,
                group_size=4,
                passes=2,
                staleness_bound=bound,
                checkpoint_every=2,
                replay=ReplayConfig(per_step=2, rare_below=1.0),
                length=LengthCurriculum(start=8, end=12, steps=3),
                train=TrainConfig(learning_rate=1e-3),
            ),
        ),
        evaluation=EvaluationConfig(count=6),
        sandbox=SandboxConfig(boxes=2, warm=0),
    )


def with_critic(*, steps: int) -> Recipe:
    """PPO against verifiers alone, with a critic and a price on divergence."""
    train = TrainConfig(learning_rate=1e-3)
    rl = RlStage(
        steps=steps,
        groups_per_batch=2,
        group_size=4,
        passes=2,
        checkpoint_every=2,
        advantage="gae",
        critic=CriticConfig(kl=0.05, passes=2, train=train),
        train=train,
    )
    return recipe().model_copy(update={"stages": (rl,), "engines": 1})


class Lines:
    """Prints every step, so that a test can wait for one."""

    def stage(self, name: str, total: int | None, unit: str) -> None:
        print("stage", name, flush=True)

    def advance(self, done: int, total: int | None = None, **facts: object) -> None:
        print("at", done, flush=True)

    def note(self, text: str) -> None:
        print("note", text, flush=True)

    def finish(self, name: str, **facts: object) -> None:
        print("done", name, flush=True)


def register() -> None:
    VERIFIERS.register("early_letters", EarlyLetters())


if __name__ == "__main__":
    register()
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    if mode in ("new", "critic"):
        made = recipe if mode == "new" else with_critic
        start_run(made(steps=int(sys.argv[3])), folder, Lines())
    else:
        resume_run(folder, Lines())
