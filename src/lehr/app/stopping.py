"""Ends work at SIGTERM and SIGHUP as Ctrl-C ends it: cleanly, with what was done kept."""

from __future__ import annotations

import signal
from types import FrameType

from lehr.app.session import Session

NUMBERS = (signal.SIGTERM, signal.SIGHUP)


def heed_requests_to_stop(session: Session) -> None:
    """From now on pass the first SIGTERM or SIGHUP to whatever handles SIGINT, and note it in ``session``.

    Later ones change nothing: a terminal that closes sends several, and the first is being obeyed. SIGHUP that
    is ignored, as under ``nohup``, stays ignored. SIGINT is heeded also where a shell ignores it, as it does
    for a script's jobs in the background: asyncio ends work in order only where it may handle SIGINT.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def stop(number: int, frame: FrameType | None) -> None:
        if session.stopped_by != signal.SIGINT:
            return
        session.stopped_by = number
        interrupt = signal.getsignal(signal.SIGINT)
        assert callable(interrupt)
        interrupt(number, frame)

    for number in NUMBERS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, stop)
