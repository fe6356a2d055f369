"""The arms of the study: what differs between them, and the sizes that they share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lehr.core.config import Config, digest_of
from lehr.pipeline.recipe import EvaluationConfig, Recipe, RlStage, SandboxConfig, SftStage
from lehr.rollout.replay import ReplayConfig
from lehr.train.base import AdvantageConfig, AlarmConfig, PolicyLossName, Scale, TrainConfig

DOMAINS = Path(__file__).parent / "domains"
SFT_BATCH = 16
LOUD = "study/rising"
"""The domain whose rewards are multiplied by 100 in two arms."""


class Sizes(Config):
    """The budget that every arm has."""

    seeds: tuple[int, ...] = (0, 1, 2)
    domains: tuple[str, ...] = tuple(
        sorted(f"study/{card.parent.name}" for card in DOMAINS.glob("plain/*/*.toml"))
    )
    steps: int = 40
    groups_per_batch: int = 8
    group_size: int = 6
    every: int = 8
    """Steps between two measurements."""
    heldout: int = 40
    """Tasks of each domain that are measured."""
    demonstrations: int = 200
    """Of each domain, before reinforcement learning."""
    epochs: int = 4
    learning_rate: float = 1e-3
    sft_learning_rate: float = 3e-3


QUICK = Sizes(
    seeds=(0,), domains=("study/count_bits", "study/gcd"), steps=2, groups_per_batch=2, group_size=4, every=1,
    heldout=2, demonstrations=48, epochs=6,
)  # fmt: skip
"""For a test: it shows that the path is whole, and nothing else."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train. lockstep: whether every batch is made to lag by exactly ``bound`` versions."""

    name: str
    bound: int = 0
    loss: PolicyLossName = "dppo_tv"
    loud: bool = False
    scale: Scale = "domain"
    replay: ReplayConfig | None = None
    lockstep: bool = True
    control: str = "sync"
    """The arm that it is compared with."""
    extra: bool = False
    """Run after every seed of those that the question is about."""


def arms() -> tuple[Arm, ...]:
    """Return every arm, those first that most depends on."""
    bounds: list[Arm] = []
    for bound in (8, 4, 1):
        name = f"async-{bound}"
        bounds += [Arm(name, bound), Arm(f"{name}-uncorrected", bound, "none", control=name)]
    replay = ReplayConfig(per_step=8, rare_below=0.5)
    return (
        Arm("sync"),
        *bounds,
        Arm("loud-scaled", loud=True),
        Arm("loud-unscaled", loud=True, scale="none", control="loud-scaled"),
        Arm("replay", replay=replay),
        Arm("unscaled", scale="none", extra=True),
        Arm("sync-uncorrected", loss="none", extra=True),
    )


def start_recipe(sizes: Sizes, seed: int, model: Path) -> Recipe:
    """Return what teaches the random ``model`` the form of answers; every arm of the seed starts from there."""
    count = sizes.demonstrations * len(sizes.domains)
    steps = -(-count // SFT_BATCH) * sizes.epochs
    sft = SftStage(
        demonstrations=count,
        max_epochs=sizes.epochs,
        patience=sizes.epochs,
        batch_size=SFT_BATCH,
        validation_count=min(8, sizes.heldout),
        train=TrainConfig(
            learning_rate=sizes.sft_learning_rate,
            warmup_steps=1,
            schedule="linear",
            total_steps=max(2, steps),
            final_rate=0.1,
        ),
    )
    return _recipe(sizes, seed, model, sft, (), engines=1)


def arm_recipe(sizes: Sizes, arm: Arm, seed: int, model: Path) -> Recipe:
    """Return the run of an arm from the folder ``model``."""
    rl = RlStage(
        steps=sizes.steps,
        groups_per_batch=sizes.groups_per_batch,
        group_size=sizes.group_size,
        staleness_bound=arm.bound,
        group=AdvantageConfig(scale=arm.scale),
        replay=arm.replay,
        checkpoint_every=sizes.steps,
        refuse_batches=16,
        alarms=AlarmConfig(stop=False),
        train=TrainConfig(learning_rate=sizes.learning_rate, policy_loss=arm.loss, warmup_steps=2),
    )
    return _recipe(sizes, seed, model, rl, (str(DOMAINS / "times100"),) if arm.loud else (), engines=2)


def _recipe(
    sizes: Sizes, seed: int, model: Path, stage: SftStage | RlStage, more: tuple[str, ...], *, engines: int
) -> Recipe:
    return Recipe(
        model=str(model),
        domains=sizes.domains,
        domain_paths=(str(DOMAINS / "plain"), *more),
        seed=seed,
        stages=(stage,),
        evaluation=EvaluationConfig(count=sizes.heldout, base_count=1),
        engines=engines,
        sandbox=SandboxConfig(warm=0),
    )


@cache
def _written() -> str:
    """Return a digest of every file that says what tasks are and when they are solved."""
    files = sorted(path for path in DOMAINS.rglob("*") if path.suffix in (".toml", ".py"))
    found = hashlib.blake2b(digest_size=8)
    for file in (*files, DOMAINS.parent / "rules.py"):
        found.update(f"{file.relative_to(DOMAINS.parent)}\n".encode() + file.read_bytes())
    return found.hexdigest()


def digest(sizes: Sizes, arm: Arm | None, seed: int) -> str:
    """Return what a result is kept under: it changes with everything that the recipe of its run says, with the
    domains and with their rules.
    """
    start = start_recipe(sizes, seed, Path("start")).model_dump(mode="json")
    body: dict[str, object] = {"start": start, "every": sizes.every, "domains": _written()}
    if arm is not None:
        run = arm_recipe(sizes, arm, seed, Path("start")).model_dump(mode="json")
        body |= {"run": run, "lockstep": arm.lockstep}
    for part in body.values():
        if isinstance(part, dict):
            part["domain_paths"] = [Path(path).name for path in part["domain_paths"]]
    return digest_of(body)
