"""Refused system calls: told by name, to the call during which they happened, at no cost to the host."""

from __future__ import annotations

import asyncio
import os
import time

from lehr.core.protocols import ListRecorder
from lehr.sandbox.base import Spec
from lehr.sandbox.pool import Pool

CALL = """
import ctypes, errno, sys
library = ctypes.CDLL(None, use_errno=True)
for number in map(int, sys.argv[1:]):
    library.syscall(number, 0, 0, 0, 0)
    print(errno.errorcode[ctypes.get_errno()])
"""
X86, ARM = {"bpf": "321", "io_uring_setup": "425", "unlisted": "999"}, {"bpf": "280", "io_uring_setup": "425"}
NUMBERS = X86 if os.uname().machine == "x86_64" else {**X86, **ARM}


def test_they_are_named_in_the_result_and_in_the_record() -> None:
    recorder = ListRecorder()

    async def run() -> None:
        pool = Pool("bwrap", warm=0, recorder=recorder)
        async with pool.lease(Spec()) as box:
            await box.write("call.py", CALL.encode())
            numbers = [NUMBERS[name] for name in ("io_uring_setup", "bpf", "io_uring_setup", "unlisted")]
            result = await box.exec(["python3", "call.py", *numbers])
            assert result.stdout.split() == [b"EPERM", b"EPERM", b"EPERM", b"ENOSYS"]
            assert result.denied == ("io_uring_setup", "bpf")
            assert (await box.exec(["true"])).denied == ()
            async with box.shell() as shell:
                assert (await shell.run("unshare -U true")).denied == ("unshare",)
                assert (await shell.run("true")).denied == ()
        await pool.close()

    asyncio.run(run())
    assert [fields["denied"] for _, fields in recorder.events if fields.get("denied")] == [
        ["io_uring_setup", "bpf"],
        ["unshare"],
    ]


def test_what_happened_between_calls_and_beside_another_is_told_once() -> None:
    async def run() -> None:
        pool = Pool("bwrap", warm=0)
        async with pool.lease(Spec()) as box, box.shell() as shell:
            await shell.run("(sleep 0.2; unshare -U true) > /dev/null 2>&1 &")
            await asyncio.sleep(0.6)
            assert (await shell.run("true")).denied == ("unshare",)
            beside = asyncio.create_task(shell.run("unshare -U true; sleep 0.6"))
            await asyncio.sleep(0.3)
            told = [*(await box.exec(["true"])).denied, *(await beside).denied]
            assert told == ["unshare"]
        await pool.close()

    asyncio.run(run())


def test_who_asks_for_ever_is_slowed_down_and_the_host_is_not() -> None:
    async def run() -> None:
        pool = Pool("bwrap", warm=0)
        async with pool.lease(Spec()) as box:
            before = time.process_time()
            code = "import ctypes\nl = ctypes.CDLL(None)\nwhile True: l.unshare(0x10000000)"
            result = await box.exec(["python3", "-c", code], timeout_s=1.0)
            assert result.verdict == "timeout_wall" and result.denied == ("unshare",)
            assert result.usage.wall_s < 1.5
            assert time.process_time() - before < 0.4
            assert (await box.exec(["true"])).verdict == "ok"
        await pool.close()

    asyncio.run(run())


def test_a_program_that_is_killed_while_it_asks_leaves_nothing_behind() -> None:
    async def run() -> None:
        pool = Pool("bwrap", warm=0)
        code = (
            "import ctypes, os\nl = ctypes.CDLL(None)\n"
            "for _ in range(4): os.fork()\nwhile True: l.unshare(0x10000000)"
        )
        for _ in range(5):
            async with pool.lease(Spec()) as box:
                work = asyncio.create_task(box.exec(["python3", "-c", code]))
                await asyncio.sleep(0.1)
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
        await pool.close()

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(run())
    assert len(os.listdir("/proc/self/fd")) == before
