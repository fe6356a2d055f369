"""System calls that the filter refuses, by name: the kernel asks, we refuse and remember what was asked.

seccomp_unotify(2). A box stops for as long as the answer takes, so that one which asks for ever is slowed
down instead of keeping the host busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import functools
import os
import select
import struct

RECEIVE, ANSWER = 0xC0502100, 0xC0182101
NOTICE = struct.Struct("=QIIiIQ6Q")
REPLY = struct.Struct("=QqiI")
PROMPTLY = 64
"""How many calls of one exec are answered without delay; after them ``SLOWLY`` every ``PAUSE_S``."""
SLOWLY = 8
PAUSE_S = 0.01
MOST_NAMES = 16


class Refusals:
    """Answers for one box. Life cycle: made with the kernel's descriptor, which it owns; :meth:`close`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._loop = asyncio.get_running_loop()
        self._poll = select.poll()
        self._poll.register(fd, select.POLLIN)
        self._asked = 0
        self._names: dict[str, None] = {}
        self._pause: asyncio.TimerHandle | None = None
        self._loop.add_reader(fd, self._on_asked)

    def take(self) -> tuple[str, ...]:
        """Return the calls that were refused since this was called last, in the order of their first use, at
        most ``MOST_NAMES``.
        """
        if self._fd >= 0 and self._pause is None:
            self._answer()
        names = tuple(self._names)
        self._asked = 0
        self._names.clear()
        return names

    def _on_asked(self) -> None:
        if not self._answer():
            self.close()
        elif self._asked > PROMPTLY:
            self._loop.remove_reader(self._fd)
            self._pause = self._loop.call_later(PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self._fd, self._on_asked)

    def _answer(self) -> bool:
        """Refuse what waits. False once nobody is left who could ask: then the kernel must not be asked."""
        for _ in range(PROMPTLY if self._asked <= PROMPTLY else SLOWLY):
            ready = self._poll.poll(0)
            if not ready:
                return True
            if not ready[0][1] & select.POLLIN:
                return False
            notice = bytearray(NOTICE.size)
            with contextlib.suppress(FileNotFoundError, InterruptedError):  # whoever asked was killed
                fcntl.ioctl(self._fd, RECEIVE, notice)
                number, _pid, _flags, call, *_ = NOTICE.unpack(notice)
                self._asked += 1
                if len(self._names) < MOST_NAMES:
                    self._names.setdefault(_name(call))
                fcntl.ioctl(self._fd, ANSWER, bytearray(REPLY.pack(number, 0, -errno.EPERM, 0)))
        return True

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


@functools.cache
def _name(number: int) -> str:
    from lehr.sandbox import seccomp

    return seccomp.name_of(number)
