"""A model behind an API that can be measured: boxes and judges around it, without an engine of our own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from lehr.core.config import resolve
from lehr.core.errors import ConfigError
from lehr.engine.openai.completer import OpenAICompleter
from lehr.engine.openai.settings import PREFIX, OpenAIConfig, parse_name
from lehr.pipeline.recipe import SandboxConfig
from lehr.rollout.chat import ChatLoop
from lehr.rollout.group import GroupRunner
from lehr.sandbox.pool import Pool


@dataclass(frozen=True, slots=True)
class Asked:
    """Asks a model and judges what it says."""

    completer: OpenAICompleter
    runner: GroupRunner


def api_settings(model: str, overrides: Sequence[str] = ()) -> OpenAIConfig | None:
    """Return the settings of ``openai:NAME@BASE_URL`` with ``KEY=VALUE`` overrides; None for any other model.

    Raises :class:`ConfigError` for a name or an override that cannot be used.
    """
    if not model.startswith(PREFIX):
        if overrides:
            raise ConfigError(
                f"{overrides[0]!r} is a setting of a model behind an API, and {model!r} is none",
                expected=f"--model {PREFIX}NAME@BASE_URL",
            )
        return None
    return resolve(OpenAIConfig, parse_name(model), overrides, where="--api")


@asynccontextmanager
async def open_asked(config: OpenAIConfig, *, sandbox: SandboxConfig | None = None) -> AsyncGenerator[Asked]:
    """Make boxes ready and open the API; close both whatever happens."""
    sandbox = sandbox or SandboxConfig()
    completer = OpenAICompleter(config)
    pool = Pool(sandbox.backend, warm=sandbox.warm, limit=sandbox.boxes)
    try:
        yield Asked(completer, GroupRunner(ChatLoop(completer, pool), pool))
    finally:
        await asyncio.shield(_close(completer, pool))


async def _close(completer: OpenAICompleter, pool: Pool) -> None:
    try:
        await completer.close()
    finally:
        await pool.close()
