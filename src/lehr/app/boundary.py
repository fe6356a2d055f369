"""Errors to messages and exit statuses. Called from ``lehr.app.cli`` alone."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import click

from lehr.app.session import Session, shown, state_folder
from lehr.core.errors import ConfigError, HostUnfit, LehrError, MissingDependency, OutOfSpace, UnknownName

MISTAKES = (ConfigError, UnknownName, MissingDependency, HostUnfit)
"""What the person who typed the command can put right: exit status 2."""

PATHS = (
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST,
    errno.ENAMETOOLONG, errno.ELOOP,
)  # fmt: skip
"""What is wrong with a path that somebody gave, rather than with lehr."""

FULL = (errno.ENOSPC, errno.EDQUOT)


def report_error(error: BaseException, session: Session) -> int:
    """Print what a person needs to know about ``error`` and return the exit status."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if session.debug and isinstance(error, Exception) and not isinstance(error, click.ClickException):
        traceback.print_exception(error)
    causes = list(_causes(error))
    if any(isinstance(cause, KeyboardInterrupt | click.Abort) for cause in causes):
        _say("stopped", *_resume("Everything up to here is kept. Resume with", session))
        return 128 + session.stopped_by
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        click.echo(error.format_message())
        return 0
    if isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else session.command
        _say(f"error: {_sentence(error.format_message())}", f"next: {command} --help")
        return 2
    if isinstance(error, click.ClickException):
        _say(f"error: {_sentence(error.format_message())}")
        return 2
    if full := next((cause for cause in causes if _is_full(cause)), None):
        return _out_of_space(full, session)
    known = next((cause for cause in causes if isinstance(cause, LehrError)), None)
    if known is not None:
        mistake = isinstance(known, MISTAKES)
        going_on = () if mistake or not known.resumable else _resume("Resume with", session)
        expected = f"expected {known.expected}" if known.expected else ""
        _say(f"error: {known.what}", expected, known.hint, *going_on)
        return 2 if mistake else 1
    place = next((c for c in causes if isinstance(c, OSError) and c.filename and c.errno in PATHS), None)
    if place is not None:
        _say(
            f"error: cannot use {os.fsdecode(place.filename)}: {place.strerror}",
            "Check the path, and LEHR_HOME if it lies there.",
            *_resume("What was recorded is kept. Resume with", session),
        )
        return 1
    return _defect(error, session)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the members of its groups, and what each was raised from, outermost first."""
    seen: set[int] = set()
    queue = [error]
    while queue:
        current = queue.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        if isinstance(current, BaseExceptionGroup):
            queue.extend(cast("BaseExceptionGroup[BaseException]", current).exceptions)
        queue.extend(e for e in (current.__cause__, current.__context__) if e is not None)


def _is_full(error: BaseException) -> bool:
    if isinstance(error, OutOfSpace):
        return True
    if isinstance(error, OSError) and error.errno in FULL:
        return True
    return "database or disk is full" in str(error)


def _out_of_space(error: BaseException, session: Session) -> int:
    where = session.run or Path.cwd()
    if isinstance(error, OutOfSpace):
        expected = f"expected {error.expected}" if error.expected else ""
        lines = [f"error: {error.what}", expected, error.hint]
    else:
        place = getattr(error, "filename", None) or where
        lines = [f"error: no space left on the disk of {place}", "Free some space there."]
    _say(*lines, *_resume("What was recorded is intact. Resume with", session))
    return 1


def _defect(error: BaseException, session: Session) -> int:
    log = _write_log(error, session)
    line = str(error).splitlines()[0] if str(error) else "no message"
    where = f"The traceback is in {shown(log)}." if log else "The traceback could not be written anywhere."
    _say(
        f"error: unexpected {type(error).__name__}: {line}",
        f"This is a defect of lehr. {where} `lehr --debug …` prints it.",
        *_resume("What was recorded is kept. Resume with", session),
    )
    return 70


def _write_log(error: BaseException, session: Session) -> Path | None:
    text = "".join(traceback.format_exception(error))
    name = f"error-{time.strftime('%Y%m%d-%H%M%S')}.log"
    folders = [state_folder(), Path(tempfile.gettempdir())]
    if session.run is not None and session.run.is_dir():
        folders.insert(0, session.run / "logs")
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
            return folder / name
    return None


def _resume(lead: str, session: Session) -> tuple[str, ...]:
    command = session.resume_command
    return () if command is None else (f"{lead}: {command}",)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else text + "."


def _say(first: str, *more: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        click.echo(first, err=True)
        for line in more:
            if line:
                click.echo(f"  {line}", err=True)
