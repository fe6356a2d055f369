"""The teacher of a distillation: a model behind an API, or one of our own in engines beside the student's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from lehr.cluster.local import LocalCluster
from lehr.core.config import resolve
from lehr.engine.completer import EngineCompleter
from lehr.engine.openai.completer import OpenAICompleter
from lehr.engine.openai.settings import PREFIX, OpenAIConfig, parse_name
from lehr.engine.router import Router
from lehr.model.vocabulary import require_same_vocabulary
from lehr.pipeline.context import Context
from lehr.pipeline.models import context_tokens, load_renderer, locate_model, require_model
from lehr.pipeline.observer import Observer
from lehr.pipeline.sampler import start_engines
from lehr.pipeline.stages.settings import DistillStage


def api_of(stage: DistillStage) -> OpenAIConfig | None:
    """Return the settings of a teacher behind an API, None for a teacher of one's own."""
    if not stage.teacher.startswith(PREFIX):
        return None
    body = {**parse_name(stage.teacher), **stage.api}
    return resolve(OpenAIConfig, body, where=f"stage {stage.name}")


def require_teacher(stage: DistillStage) -> None:
    """Raise what keeps the teacher from being used, as far as that can be told without asking or fetching
    it.
    """
    config = api_of(stage)
    if config is None:
        require_model(stage.teacher, only_sampled=True)
    else:
        asyncio.run(OpenAICompleter(config).close())


def fetch_teacher(stage: DistillStage, student: Path, observer: Observer) -> Path | None:
    """Return the folder of a teacher of one's own, fetched where need be; None for one behind an API.

    Raises ``ConfigError`` where it is to score the student's tokens and has another vocabulary.
    """
    if api_of(stage) is not None:
        return None
    folder = locate_model(stage.teacher, observer, only_sampled=True)
    if stage.method == "on_policy":
        require_same_vocabulary(student, folder)
    return folder


@asynccontextmanager
async def open_completer(
    ctx: Context, stage: DistillStage
) -> AsyncGenerator[EngineCompleter | OpenAICompleter]:
    """Open the teacher to be asked in messages; end it whatever happens."""
    config = api_of(stage)
    if config is None:
        folder = locate_model(stage.teacher, ctx.observer, only_sampled=True)
        async with open_scorer(ctx, folder) as engine:
            yield EngineCompleter(engine, load_renderer(folder), context_tokens=context_tokens(folder))
        return
    completer = OpenAICompleter(config)
    try:
        yield completer
    finally:
        ctx.observer.note(f"{config.model}: {completer.spent.summary()}")
        await asyncio.shield(completer.close())


@asynccontextmanager
async def open_scorer(ctx: Context, folder: Path) -> AsyncGenerator[Router]:
    """Start engines on the weights in ``folder``, beside the student's; end them whatever happens."""
    cluster = LocalCluster(ctx.folder.path)
    try:
        yield await start_engines(
            cluster,
            folder,
            ctx.recipe.engine,
            ctx.recipe.engines,
            incarnation=ctx.ledger.incarnation,
            name="teacher",
        )
    finally:
        await asyncio.shield(cluster.close())
