from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import click
import pytest

from lehr.app.boundary import report_error
from lehr.app.session import Session
from lehr.core.errors import (
    ConfigError,
    Diverged,
    HostUnfit,
    MissingDependency,
    OutOfSpace,
    RoleLost,
    UnknownName,
)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """A session in the middle of a run."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text("{}")
    return Session(run=run)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("bad recipe"),
        UnknownName.among("domain", "x", ["y"]),
        MissingDependency("bwrap is not installed", hint="sudo apt-get install -y bubblewrap"),
        HostUnfit("user namespaces are forbidden", hint="sysctl -w kernel.unprivileged_userns_clone=1"),
    ],
)
def test_a_mistake_exits_2_and_shows_the_next_step(error, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(error, Session()) == 2
    shown = capsys.readouterr().err
    assert error.what in shown and error.hint in shown and "Traceback" not in shown


@pytest.mark.parametrize("error", [RoleLost("engine died"), Diverged("loss is nan"), OutOfSpace("disk full")])
def test_a_failed_run_exits_1_and_says_how_to_resume(
    error, session, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(error, session) == 1
    assert f"lehr runs resume {session.run}" in capsys.readouterr().err


def test_an_error_inside_task_groups_is_found(session, capsys: pytest.CaptureFixture[str]) -> None:
    nested = ExceptionGroup("tasks", [ValueError("noise"), ExceptionGroup("more", [RoleLost("trainer died")])])
    assert report_error(nested, session) == 1
    assert "trainer died" in capsys.readouterr().err


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_ctrl_c_exits_130_and_says_how_to_resume(error, session, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(error, session) == 130
    assert f"lehr runs resume {session.run}" in capsys.readouterr().err


def test_ctrl_c_before_a_run_offers_nothing_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_error(KeyboardInterrupt(), Session()) == 130
    assert "resume" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/data/x"),
        RuntimeError("(sqlite3.OperationalError) database or disk is full"),
    ],
)
def test_a_full_disk_is_one_message_that_promises_what_is_kept(
    error, session, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(error, session) == 1
    shown = capsys.readouterr().err
    assert "no space left" in shown and "intact" in shown and "lehr runs resume" in shown


def test_a_defect_is_one_line_and_a_log(session, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise ZeroDivisionError("oh")
    except ZeroDivisionError as error:
        assert report_error(error, session) == 70
    shown = capsys.readouterr().err
    assert "Traceback" not in shown and "ZeroDivisionError: oh" in shown
    (log,) = (session.run / "logs").glob("error-*.log")
    assert "Traceback" in log.read_text() and log.name in shown


def test_debug_shows_the_traceback(session, capsys: pytest.CaptureFixture[str]) -> None:
    session.debug = True
    assert report_error(ZeroDivisionError("oh"), session) == 70
    assert "ZeroDivisionError: oh" in capsys.readouterr().err.splitlines()[0]


def test_the_log_of_a_defect_outside_a_run_goes_to_lehr_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LEHR_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert report_error(ZeroDivisionError("oh"), Session()) == 70
    (log,) = (tmp_path / "home" / "logs").glob("error-*.log")
    assert str(log) in capsys.readouterr().err and not (tmp_path / "state").exists()


@pytest.mark.parametrize("kind", [FileNotFoundError, NotADirectoryError, PermissionError, IsADirectoryError])
def test_a_path_that_cannot_be_used_is_no_defect(
    kind: type[OSError], session, capsys: pytest.CaptureFixture[str]
) -> None:
    number = {
        FileNotFoundError: errno.ENOENT, NotADirectoryError: errno.ENOTDIR, PermissionError: errno.EACCES,
        IsADirectoryError: errno.EISDIR,
    }[kind]  # fmt: skip
    group = ExceptionGroup("tasks", [OSError(number, os.strerror(number), "/some/place")])
    assert report_error(group, session) == 1
    assert f"cannot use /some/place: {os.strerror(number)}" in capsys.readouterr().err
    assert report_error(OSError(errno.EBADF, "Bad file descriptor"), session) == 70


def test_the_signal_that_stopped_it_is_the_exit_status(session, capsys: pytest.CaptureFixture[str]) -> None:
    session.stopped_by = signal.SIGTERM
    assert report_error(KeyboardInterrupt(), session) == 143
