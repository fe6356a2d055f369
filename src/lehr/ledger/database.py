"""The SQLite file under a ledger: how it is opened, and what its errors mean to a person.

Write-ahead log, ``synchronous=FULL`` (a commit survives the loss of power), foreign keys, and every
transaction begun with ``BEGIN IMMEDIATE``, so that read-then-write is one transaction.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.exc import DatabaseError
from sqlalchemy.pool import NullPool, StaticPool

from lehr.core.errors import ConfigError, HostUnfit, LehrError, OutOfSpace
from lehr.ledger.schema import HEAD

BUSY_S = 30.0


class LedgerDamaged(LehrError, RuntimeError):
    """The file is not a ledger, or the disk under it fails."""

    code = "ledger_damaged"
    resumable = False


def open_writer(path: Path) -> Engine:
    """Open or create the file at ``path`` and bring it to the newest migration."""
    engine = create_engine(
        f"sqlite:///{path}",
        poolclass=StaticPool,
        connect_args={"timeout": BUSY_S, "isolation_level": None, "check_same_thread": False},
    )

    def connected(connection: Any, _: Any) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    def begun(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    event.listen(engine, "connect", connected)
    event.listen(engine, "begin", begun)
    try:
        with named_errors(path, "opened"):
            _migrate(engine, path)
    except BaseException:
        engine.dispose()
        raise
    return engine


def open_reader(path: Path) -> Engine:
    """Open the file at ``path`` for reading only; works beside a writer and after its death."""
    if not path.exists():
        raise ConfigError(f"there is no ledger at {path}", hint="`lehr runs list` shows the runs here.")
    writable = os.access(path.parent, os.W_OK)
    mode = "mode=ro" if writable or path.with_name(path.name + "-wal").exists() else "immutable=1"

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=BUSY_S)
        connection.execute("PRAGMA query_only=ON")
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
    with named_errors(path, "read"), engine.connect() as connection:
        found = _version(connection)
    if found != HEAD:
        from lehr.ledger.migrate import refuse_newer

        refuse_newer(found, path)
        raise ConfigError(
            f"the ledger at {path} is at version {found or 'none'}",
            expected=f"version {HEAD}",
            hint="Resume the run once with this lehr, which brings it up to date.",
        )
    return engine


@contextmanager
def named_errors(path: Path, doing: str) -> Generator[None]:
    """Turn the database's errors into ours: full disk, no permission, lock, damage."""
    try:
        yield
    except DatabaseError as error:
        raise _named(error.orig if error.orig is not None else error, path, doing) from error
    except sqlite3.Error as error:
        raise _named(error, path, doing) from error


def _named(error: BaseException, path: Path, doing: str) -> LehrError:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return OutOfSpace(
            f"no space left while {path} was {doing}",
            hint="Everything committed before is intact: free some space and resume the run.",
        )
    if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM):
        return HostUnfit(
            f"{path} cannot be {doing}: {error}",
            expected="a folder that may be written to",
            hint=f"Make {path.parent} writable for you, or work on a copy of it.",
        )
    if code == sqlite3.SQLITE_BUSY:
        return HostUnfit(
            f"{path} was locked for {BUSY_S:.0f} s", hint="Another process holds it; is the run still going?"
        )
    if code == sqlite3.SQLITE_IOERR and _is_full(path):
        return OutOfSpace(f"no space left while {path} was {doing}", hint="Free some space and resume the run.")
    return LedgerDamaged(
        f"{path} could not be {doing}: {error}",
        expected="the ledger of a run, whole",
        hint="Put the file back from a copy, or start a new run in another folder with `lehr train`.",
    )


def _is_full(path: Path) -> bool:
    stat = os.statvfs(path.parent)
    return stat.f_bavail * stat.f_frsize < 1 << 20


def _version(connection: Connection) -> str | None:
    known = connection.execute(text("SELECT 1 FROM sqlite_master WHERE name = 'alembic_version'")).first()
    if known is None:
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()


def _migrate(engine: Engine, path: Path) -> None:
    with engine.begin() as connection:
        found = _version(connection)
    if found == HEAD:
        return
    from lehr.ledger.migrate import upgrade

    upgrade(engine, found, path)
