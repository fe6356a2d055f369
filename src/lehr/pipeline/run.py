"""Starts, resumes and ends a run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lehr.cluster.base import Role
from lehr.cluster.local import LocalCluster
from lehr.core.errors import LehrError
from lehr.domains.catalogue import open_domain
from lehr.ledger.blobs import BlobStore
from lehr.ledger.recorder import LedgerRecorder
from lehr.ledger.store import Ledger
from lehr.model.weights import weight_files
from lehr.pipeline.context import Context
from lehr.pipeline.conversations import read_conversations
from lehr.pipeline.cores import divide
from lehr.pipeline.folder import RunFolder
from lehr.pipeline.measure import measure
from lehr.pipeline.metrics import BusyMeter, MetricsWriter
from lehr.pipeline.models import context_tokens, load_renderer, locate_model, locate_reward_model, require_model
from lehr.pipeline.observer import Observer, Silent
from lehr.pipeline.pairs import read_pairs
from lehr.pipeline.recipe import (
    DistillStage,
    Recipe,
    RewardModelStage,
    RlStage,
    SftStage,
    closing_name,
    is_measured,
)
from lehr.pipeline.sampler import start_engines
from lehr.pipeline.stages.control import run_control
from lehr.pipeline.stages.distill import run_distill
from lehr.pipeline.stages.prefer import run_prefer, run_reward_model
from lehr.pipeline.stages.preferences import PairSource
from lehr.pipeline.stages.reject import run_reject
from lehr.pipeline.stages.rl import run_rl
from lehr.pipeline.stages.sft import run_sft
from lehr.pipeline.teacher import fetch_teacher, require_teacher
from lehr.rollout.agent import AgentLoop
from lehr.rollout.group import GroupRunner
from lehr.sandbox.base import BACKENDS
from lehr.sandbox.pool import Pool
from lehr.train.remote import RemoteTrainer

FLUSH_S = 2.0

STAGES: dict[str, Callable[[Context, Any, Path], Awaitable[str | None]]] = {
    "sft": run_sft,
    "reject": run_reject,
    "distill": run_distill,
    "prefer": run_prefer,
    "rl": run_rl,
    "control": run_control,
}
"""A stage's type and what runs it. What it returns, if anything, is the stage's last line."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Where a finished run lies and how long each stage took, in seconds."""

    folder: Path
    seconds: dict[str, float]


def check_recipe(recipe: Recipe, say: Callable[[str], object] = lambda _: None) -> None:
    """Raise ``UnknownName`` or ``ConfigError`` for a model, a domain or a kind of box that is not there.

    say: hears which domains have fewer held-out tasks than are asked for; all of theirs are then measured.
    """
    require_model(recipe.model)
    BACKENDS.get(recipe.sandbox.backend)
    for stage in recipe.stages:
        if isinstance(stage, SftStage) and stage.data:
            read_conversations(Path(stage.data))
        elif isinstance(stage, DistillStage):
            require_teacher(stage)
        elif isinstance(stage, PairSource) and stage.data:
            read_pairs(Path(stage.data))
        elif isinstance(stage, RlStage) and stage.reward_model and stage.reward_model.path:
            locate_reward_model(Path(stage.reward_model.path))
    asked = recipe.evaluation.count
    for name in recipe.domains:
        has = open_domain(name, recipe.domain_paths).card.splits.get("heldout", 0)
        if has < asked:
            say(f"evaluation.count is {asked}; {name} has {has} held-out tasks, and all of them are measured")


def _make_ready(recipe: Recipe, observer: Observer) -> None:
    """Build images before anything is started: no box waits as long as that takes."""
    for name in recipe.domains:
        open_domain(name, recipe.domain_paths).make_ready(observer.note)


def _fetch_teachers(recipe: Recipe, model: Path, observer: Observer) -> None:
    """Have every teacher here, and refuse one that cannot teach this model, before anything is trained."""
    for stage in recipe.stages:
        if isinstance(stage, DistillStage):
            fetch_teacher(stage, model, observer)


def _require_short_pairs(recipe: Recipe, model: Path) -> None:
    """Refuse files with pairs that the model cannot read, before anything is trained."""
    for stage in recipe.stages:
        if isinstance(stage, PairSource) and stage.data:
            limit = context_tokens(model, stage.max_tokens)
            read_pairs(Path(stage.data), load_renderer(model), max_tokens=limit)


def start_run(recipe: Recipe, path: Path, observer: Observer | None = None) -> RunResult:
    """Run a recipe in a new folder. Ctrl-C ends it cleanly; :func:`resume_run` goes on."""
    observer = observer or Silent()
    check_recipe(recipe, observer.note)
    _make_ready(recipe, observer)
    model = locate_model(recipe.model, observer)
    _fetch_teachers(recipe, model, observer)
    _require_short_pairs(recipe, model)
    folder = RunFolder.create(path, recipe)
    return asyncio.run(_run(folder, recipe, model, observer))


def resume_run(path: Path, observer: Observer | None = None) -> RunResult:
    """Go on with a run that was interrupted. Says from where; a finished run returns at once."""
    observer = observer or Silent()
    folder, recipe = RunFolder.open(path)
    folder.require_ledger()
    _make_ready(recipe, observer)
    model = locate_model(recipe.model, observer)
    _fetch_teachers(recipe, model, observer)
    return asyncio.run(_run(folder, recipe, model, observer))


async def _run(folder: RunFolder, recipe: Recipe, model: Path, observer: Observer) -> RunResult:
    folder.require_space()
    ledger = Ledger.open(folder.ledger, digest=folder.digest)
    try:
        policies = [stage for stage in recipe.stages if not isinstance(stage, RewardModelStage)]
        done = [stage.name for stage in policies if ledger.stage_done(stage.name)]
        if ledger.stage_done(closing_name(recipe.stages[-1])):
            observer.note(f"{folder.path} is finished; nothing is left to do")
            return RunResult(folder.path, {s.name: ledger.stage_seconds(s.name) for s in recipe.stages})
        start = folder.require_checkpoint(done[-1]) if done else model
        if ledger.incarnation > 1:
            where = f"after stage {done[-1]}" if done else "from the base model"
            observer.note(f"resuming {folder.path} {where}")
        async with _context(folder, recipe, start, ledger, observer) as ctx:
            await _stages(ctx, model)
        seconds = {stage.name: ledger.stage_seconds(stage.name) for stage in recipe.stages}
        return RunResult(folder.path, seconds)
    finally:
        ledger.close()


async def _stages(ctx: Context, model: Path) -> None:
    current = model
    count = ctx.recipe.evaluation.count
    base = min(count, ctx.recipe.evaluation.base_count)
    await _timed(ctx, "measure base", lambda: measure(ctx, "base", split="heldout", count=base))
    for stage in ctx.recipe.stages:
        previous, current = current, ctx.folder.checkpoint(stage.name)
        if isinstance(stage, RewardModelStage):
            current = previous
            if not ctx.ledger.stage_done(stage.name):
                ctx.folder.require_space()
                ctx.ledger.begin_stage(stage.name)
                ctx.observer.note(await run_reward_model(ctx, stage, previous))
                ctx.ledger.end_stage(stage.name)
                ctx.observer.finish(stage.name, seconds=round(ctx.ledger.stage_seconds(stage.name), 1))
            continue
        if not ctx.ledger.stage_done(stage.name):
            ctx.folder.require_space()
            ctx.ledger.begin_stage(stage.name)
            closing = await STAGES[stage.type](ctx, stage, previous)
            await ctx.trainer.save(current, resumable=False)
            ctx.ledger.end_stage(stage.name)
            ctx.observer.finish(stage.name, seconds=round(ctx.ledger.stage_seconds(stage.name), 1))
            if closing:
                ctx.observer.note(closing)
            await ctx.sync_weights()
        elif not ctx.ledger.stage_done(f"measure {stage.name}"):
            await ctx.trainer.load(current, optimizer=False)
            await ctx.sync_weights()
        if is_measured(stage):
            await _timed(
                ctx,
                f"measure {stage.name}",
                lambda name=stage.name: measure(ctx, name, split="heldout", count=count),
            )


async def _timed(ctx: Context, name: str, work: Callable[[], Awaitable[object]]) -> None:
    if ctx.ledger.stage_done(name):
        return
    ctx.ledger.begin_stage(name)
    await work()
    ctx.ledger.end_stage(name)


@asynccontextmanager
async def _context(
    folder: RunFolder, recipe: Recipe, start: Path, ledger: Ledger, observer: Observer
) -> AsyncGenerator[Context]:
    """Start the roles and the pool; end them whatever happens, in bounded time."""
    domains = {name: open_domain(name, recipe.domain_paths) for name in recipe.domains}
    division = divide()
    renderer = load_renderer(start)
    cluster = LocalCluster(folder.path)
    recorder = LedgerRecorder(ledger)
    boxes = recipe.sandbox
    pool = Pool(boxes.backend, warm=boxes.warm, limit=boxes.boxes, quotas=boxes.quotas, recorder=recorder)
    metrics = MetricsWriter(folder.metrics)
    verifying = BusyMeter()
    weights = folder.weights(sum(file.stat().st_size for file in weight_files(start)))
    observer.stage("start", None, "roles")
    begun = time.monotonic()
    flushing = asyncio.create_task(_flush(recorder))
    try:
        trainer_role = Role(
            "trainer",
            "lehr.train.role:build",
            {"model": str(start), "publish_to": str(weights), "seed": recipe.seed},
            threads=division.training.threads,
        )
        async with asyncio.TaskGroup() as starting:
            engine_task = starting.create_task(
                start_engines(cluster, start, recipe.engine, recipe.engines, incarnation=ledger.incarnation)
            )
            trainer_task = starting.create_task(cluster.start(trainer_role))
        engine, trainer_handle = engine_task.result(), trainer_task.result()
        agent = AgentLoop(
            engine, renderer, pool, context_tokens=context_tokens(start), compression=recipe.compression
        )
        observer.finish("start", seconds=round(time.monotonic() - begun, 1))
        yield Context(
            recipe=recipe,
            folder=folder,
            ledger=ledger,
            blobs=BlobStore(folder.blobs),
            domains=domains,
            renderer=renderer,
            pool=pool,
            engine=engine,
            trainer_handle=trainer_handle,
            trainer=RemoteTrainer(trainer_handle),
            runner=GroupRunner(agent, pool, meter=verifying),
            verifying=verifying,
            metrics=metrics,
            observer=observer,
            division=division,
        )
    finally:
        await asyncio.shield(_close(cluster, pool, metrics, folder))
        flushing.cancel()
        with suppress(LehrError):  # what stopped the run has been said
            recorder.flush()


async def _flush(recorder: LedgerRecorder) -> None:
    """Write what boxes report, from time to time."""
    with suppress(LehrError):  # the run's own next write says what is wrong
        while True:
            await asyncio.sleep(FLUSH_S)
            recorder.flush()


async def _close(cluster: LocalCluster, pool: Pool, metrics: MetricsWriter, folder: RunFolder) -> None:
    await cluster.close()
    await pool.close()
    metrics.close()
    folder.discard_weights()
