import re
from pathlib import Path

from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, text

from lehr.ledger.migrate import alembic_config
from lehr.ledger.schema import HEAD, metadata
from lehr.ledger.store import Ledger


def test_the_migrations_make_the_metadata(tmp_path: Path) -> None:
    Ledger.open(tmp_path / "migrated.sqlite").close()
    migrated = create_engine(f"sqlite:///{tmp_path / 'migrated.sqlite'}")
    created = create_engine(f"sqlite:///{tmp_path / 'created.sqlite'}")
    metadata.create_all(created)
    with migrated.connect() as db:
        assert compare_metadata(MigrationContext.configure(db), metadata) == []
    listing = "SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL AND name != 'alembic_version'"

    def words(sql: str) -> list[str]:
        return sorted(
            re.sub(r"[(),]", " ", sql).split()
        )  # the order of constraints may differ, not what they say

    def statements(engine: Engine) -> dict[str, list[str]]:
        with engine.connect() as db:
            return {name: words(sql) for name, sql in db.execute(text(listing))}

    assert statements(migrated) == statements(created)
    migrated.dispose()
    created.dispose()


def test_the_history_is_linear_and_ends_at_head() -> None:
    scripts = ScriptDirectory.from_config(alembic_config())
    assert scripts.get_heads() == [HEAD]
    assert all(isinstance(s.down_revision, str | None) for s in scripts.walk_revisions())


def test_every_migration_can_be_undone(tmp_path: Path) -> None:
    path = tmp_path / "l.sqlite"
    Ledger.open(path).close()
    engine = create_engine(f"sqlite:///{path}")
    config = alembic_config()
    with engine.begin() as db:
        config.attributes["connection"] = db
        command.downgrade(config, "base")
    with engine.connect() as db:
        left = set(db.execute(text("SELECT name FROM sqlite_master WHERE type = 'table'")).scalars())
    assert left <= {"alembic_version", "sqlite_sequence"}
    engine.dispose()
    Ledger.open(path).close()
