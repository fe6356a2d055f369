"""Brings a ledger to the newest migration. Imported only when there is something to do."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

from lehr.core.errors import ConfigError

SCRIPTS = Path(__file__).parent / "migrations"


def alembic_config() -> Config:
    """Return the configuration that finds the migrations of this package."""
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    return config


def refuse_newer(found: str | None, path: Path) -> None:
    """Raise ``ConfigError`` for a ledger whose version ``found`` is none of those that this lehr knows."""
    known = {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}
    if found is not None and found not in known:
        raise ConfigError(
            f"{path} was written by a newer lehr (ledger version {found})",
            expected=f"version {max(known)} or older",
            hint="Update lehr.",
        )


def upgrade(engine: Engine, found: str | None, path: Path) -> None:
    """Apply what is missing since ``found``, in one transaction."""
    config = alembic_config()
    refuse_newer(found, path)
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
