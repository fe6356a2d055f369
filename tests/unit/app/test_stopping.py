from __future__ import annotations

import asyncio
import errno
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest

from lehr.app.boundary import report_error
from lehr.app.session import Session
from lehr.app.stopping import NUMBERS, heed_requests_to_stop


@pytest.fixture(autouse=True)
def restored() -> Generator[None]:
    """Give the signals back as they were."""
    numbers = (*NUMBERS, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in NUMBERS:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("heeded", [True, False])
@pytest.mark.parametrize("number", NUMBERS)
def test_a_signal_ends_the_work_as_ctrl_c_does(
    number: signal.Signals, heeded: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler if heeded else signal.SIG_IGN)
    (tmp_path / "config.json").write_text("{}")
    session = Session(run=tmp_path)
    closed: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.sleep(60)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)  # a terminal that closes sends more than one
            await asyncio.sleep(0.01)
            closed.append("cleanly")

    heed_requests_to_stop(session)
    with pytest.raises(KeyboardInterrupt) as caught:
        asyncio.run(work())
    assert closed == ["cleanly"]
    assert report_error(caught.value, session) == 128 + number
    assert f"lehr runs resume {tmp_path}" in capsys.readouterr().err


def test_in_a_job_in_the_background_what_runs_is_ended_in_order_too() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    session = Session()
    served: list[str] = []

    async def request() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.05)
        served.append("to its end")

    async def server() -> None:
        running = asyncio.create_task(request())
        try:
            await asyncio.sleep(60)
        finally:
            await running

    heed_requests_to_stop(session)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(server())
    assert served == ["to its end"]


def test_what_is_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    session = Session()
    heed_requests_to_stop(session)
    os.kill(os.getpid(), signal.SIGHUP)
    assert session.stopped_by == signal.SIGINT
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL


def test_a_terminal_that_is_gone_changes_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("lehr.app.boundary.click.echo", gone)
    assert report_error(KeyboardInterrupt(), Session(stopped_by=signal.SIGHUP)) == 129
