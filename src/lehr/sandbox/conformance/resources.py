"""Resources: every limit ends what passes it, names itself, and touches nobody else."""

from __future__ import annotations

import asyncio
import resource
import secrets
import time
from pathlib import Path

from lehr.sandbox.base import Boxes, ExecResult
from lehr.sandbox.conformance.basis import MIB, Case, expect, expect_works, python, spec
from lehr.sandbox.errors import Refused

LATE_S = 0.5


async def s1_fork_bomb(boxes: Boxes) -> None:
    """A fork bomb with memory enough ends by ``pids``; the box works afterwards."""
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    async with boxes.lease(spec(memory_bytes=512 * MIB)) as box:
        result = await python(box, bomb)
        expect(result.verdict == "pids", "a fork bomb ends by the limit on processes", result)
        await expect_works(box, "a fork bomb")
        result = await python(box, "import os\nwhile True: os.fork()")
        expect(result.verdict == "pids", "a fork bomb that gives up is named all the same", result)


async def s2_daemon(boxes: Boxes) -> None:
    """A daemon that left its session and ignores SIGTERM does not outlive its exec, nor the lease."""
    token = f"lehr-daemon-{secrets.token_hex(8)}"
    daemon = f"""
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(number, signal.SIG_IGN)
        os.execv('/bin/sh', ['sh', '-c', 'while :; do sleep 1; done', {token!r}])
    os._exit(0)
os.wait()
time.sleep(0.1)
"""
    async with boxes.lease(spec()) as box:
        result = await python(box, daemon)
        expect(result.verdict == "ok", "the parent of a daemon ends by itself", result)
        await expect_works(box, "a daemon's parent ended")
        shell = await box.shell()
        await shell.run(
            f"setsid sh -c 'trap \"\" TERM HUP; while :; do sleep 1; done' {token} >/dev/null 2>&1 &"
        )
    expect(not _running(token), "nothing of a box is alive after its release", _running(token))


def _running(token: str) -> list[str]:
    found: list[str] = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if token.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


async def s3_held_stdout(boxes: Boxes) -> None:
    """Exec returns when the main program ends, though a child holds its output open."""
    code = "import os, time\nprint('done', flush=True)\nif os.fork() == 0: time.sleep(60)"
    async with boxes.lease(spec()) as box:
        started = time.monotonic()
        result = await python(box, code)
        seconds = time.monotonic() - started
        expect(result.verdict == "ok" and result.stdout == b"done\n", "the output is complete", result)
        expect(seconds < 3, "exec returns when the main program ends", seconds)


HEAP = "a = []\nwhile True: a.append(b'x' * (1 << 20))"
MAPPING = (
    "import mmap\nm = mmap.mmap(-1, 1 << 30, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x8000)\n"
    "for i in range(0, 1 << 30, 4096): m[i] = 1"
)
UNMAPPED = (
    "import os\nkept = []\nwhile True:\n    kept.append(os.memfd_create('m'))\n"
    "    os.write(kept[-1], b'x' * (1 << 20))"
)
BOMBS = {"the heap": HEAP, "a mapping": MAPPING, "memory files": UNMAPPED}


def _names_memory(result: ExecResult, bomb: str) -> bool:
    refused = bomb is UNMAPPED and result.stderr.endswith(b"not permitted\n")
    return result.verdict == "oom" or refused


async def s4_memory_bomb(boxes: Boxes) -> None:
    """Taking memory, on the heap or by populated mappings, ends by ``oom``; a neighbour feels nothing."""
    quiet = (
        "import time\na = bytearray(b'y' * (32 << 20))\ntime.sleep(1)\n"
        "print(len(a), all(b == 121 for b in a[::4096]))"
    )
    async with boxes.lease(spec(wall_s=30.0)) as box, boxes.lease(spec(wall_s=30.0)) as neighbour:
        other = asyncio.create_task(python(neighbour, quiet))
        for what, bomb in BOMBS.items():
            result = await python(box, bomb)
            expect(_names_memory(result, bomb), f"a bomb on {what} ends by memory", result)
        await expect_works(box, "a memory bomb")
        result = await other
        expect(result.stdout == b"33554432 True\n", "a neighbour of a memory bomb is unharmed", result)


async def s41_memory_of_the_box(boxes: Boxes) -> None:
    """A memory bomb is named though it ends the box itself; then the box says that it is broken."""
    async with boxes.lease(spec(wall_s=30.0)) as neighbour:
        for what, bomb in BOMBS.items():
            async with boxes.lease(spec(wall_s=30.0)) as box:
                result = await python(box, bomb)
                expect(_names_memory(result, bomb), f"a bomb on {what} ends by memory", result)
                expect(
                    result.verdict != "oom" or result.exit_code not in (128, 137, 143), "by name alone", result
                )
                after = await python(box, "print('here')")
                whole = after.verdict == "ok" and after.stdout == b"here\n"
                expect(whole or after.verdict == "broken", "no bomb leaves a box that pretends", after)
        result = await python(neighbour, "print('here')")
        expect(result.stdout == b"here\n", "a neighbour of memory bombs is unharmed", result)


FILL = """
import errno, os, sys
def fill(folder):
    total = 0
    try:
        with open(folder + '/fill', 'wb', buffering=0) as handle:
            while True: total += handle.write(b'x' * 65536)
    except OSError as error:
        return total, errno.errorcode[error.errno]
"""


async def s5_memory_file_systems(boxes: Boxes) -> None:
    """/dev/shm and /tmp are full at the disk limit, all together."""
    limits = spec().limits
    for folder in ("/dev/shm", "/tmp"):
        async with boxes.lease(spec()) as box:
            result = await python(box, FILL + f"print(*fill({folder!r}))")
            total, error = result.stdout.split()
            expect(error in (b"ENOSPC", b"EFBIG"), f"{folder} is full at the limit", result)
            expect(int(total) <= limits.disk_bytes, f"{folder} holds no more than the limit", total)
            result = await python(box, FILL + "print(sum(fill(f)[0] for f in ('/work', '/tmp', '/dev/shm')))")
            expect(int(result.stdout) <= limits.disk_bytes, "all folders share one limit", result)
            result = await python(box, "open('/tmp/more', 'wb', buffering=0).write(b'x' * 65536) or exit(1)")
            expect(result.verdict == "disk", "a program that dies of a full disk is named", result)


async def s6_disk(boxes: Boxes) -> None:
    """/work is full at its bytes, and nothing else of the system can be written."""
    async with boxes.lease(spec()) as box:
        result = await python(box, FILL + "print(*fill('.'))")
        expect(b"ENOSPC" in result.stdout or b"EFBIG" in result.stdout, "the disk is full at its limit", result)
    elsewhere = """
import os
for folder in ('/', '/usr', '/etc', '/var', '/run', '/dev', '/proc', '/usr/lib', '/bin'):
    try: open(folder + '/written', 'w').close(); print(folder)
    except OSError: pass
"""
    async with boxes.lease(spec()) as box:
        result = await python(box, elsewhere)
        expect(result.verdict == "ok" and result.stdout == b"", "only the box's own disk is writable", result)


async def s6_inodes(boxes: Boxes) -> None:
    """/work is full at its number of files."""
    many = """
import errno, os
made = 0
try:
    while True:
        open('f%d' % made, 'w').close()
        made += 1
except OSError as error: print(made, errno.errorcode[error.errno])
"""
    limits = spec().limits
    async with boxes.lease(spec()) as box:
        result = await python(box, many)
        made, _, error = result.stdout.partition(b" ")
        held = error == b"ENOSPC\n" and int(made) <= limits.inodes
        expect(held, "inodes end at their limit", result)


async def s7_sparse_result(boxes: Boxes) -> None:
    """A file that claims to be huge is refused by its size and not read."""
    sparse = """
import os
size, handle = 1 << 40, open('result', 'wb')
while True:
    try: handle.truncate(size); break
    except OSError: size //= 2
print(size)
"""
    async with boxes.lease(spec()) as box:
        result = await python(box, sparse)
        expect(int(result.stdout) > MIB, "the file is larger than what may be read", result)
        started = time.monotonic()
        try:
            data = await box.read("result", limit_bytes=MIB)
        except Refused:
            data = None
        expect(data is None, "a huge file is refused", len(data or b""))
        expect(time.monotonic() - started < 2, "refusing takes no time")


async def s8_endless_output(boxes: Boxes) -> None:
    """Output is kept as head and tail, marked as truncated, and the host's memory stays bounded."""
    limit = spec().limits.output_bytes
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    line = "import sys\nw = sys.stdout.buffer\nfor _ in range(1024): w.write(b'x' * (1 << 20))"
    endless = "import os\nwhile True: os.write(1, b'\\x00\\xff\\xfe line\\n' * 4096)"
    some = "import sys\nsys.stdout.buffer.write(b'first' + b'\\x00\\xff' * 500000 + b'last')"
    async with boxes.lease(spec()) as box:
        for code in (line, endless):
            result = await python(box, code)
            expect(result.verdict in ("output", "timeout_wall"), "endless output is ended", result.verdict)
            expect(result.truncated and 0 < len(result.stdout) <= limit, "it is cut", len(result.stdout))
        result = await python(box, some)
        expect(result.verdict == "ok" and result.truncated, "much output is cut, not punished", result.verdict)
        expect(result.stdout[:5] == b"first" and result.stdout[-4:] == b"last", "head and tail are kept")
        expect(len(result.stdout) <= limit, "no more than the limit is kept", len(result.stdout))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    expect(grown < 64 << 10, "the host's memory is bounded", f"{grown} KiB more")


async def s9_flooded_stderr(boxes: Boxes) -> None:
    """A flood on one stream does not block the other, nor does unread input."""
    code = "import sys\nfor _ in range(32): sys.stderr.write('e' * 65536)\nprint('done')"
    async with boxes.lease(spec()) as box:
        result = await box.exec(["python3", "-I", "-c", code], stdin=b"i" * (4 * MIB))
        expect(
            result.verdict == "ok" and result.stdout == b"done\n", "both streams are drained", result.verdict
        )
        expect(result.truncated and len(result.stderr) <= spec().limits.output_bytes, "stderr is cut")


async def s10_endless_time(boxes: Boxes) -> None:
    """Sleeping, computing and swallowing every exception end by time, within half a second of the limit."""
    stubborn = """
import signal
for number in range(1, 65):
    try: signal.signal(number, lambda *_: None)
    except (OSError, ValueError): pass
while True:
    try:
        while True: pass
    except BaseException: pass
"""
    async with boxes.lease(spec(wall_s=1.0, cpu_s=60.0)) as box:
        for code in ("import time; time.sleep(1000)", stubborn):
            result = await python(box, code)
            expect(result.verdict == "timeout_wall", "wall time ends it", result)
            expect(result.usage.wall_s <= 1.0 + LATE_S, "it ends in time", result.usage)
        result = await python(box, "import time; time.sleep(1000)", timeout_s=0.3)
        expect(
            result.verdict == "timeout_wall" and result.usage.wall_s <= 0.3 + LATE_S,
            "an exec's own limit",
            result,
        )
        await expect_works(box, "a timeout")
    async with boxes.lease(spec(wall_s=30.0, cpu_s=0.5)) as box:
        for code in ("while True: pass", stubborn):
            result = await python(box, code)
            expect(result.verdict == "timeout_cpu", "CPU time ends it", result)
            expect(result.usage.cpu_s <= 0.5 + LATE_S, "it ends in time", result.usage)


async def s11_short_children(boxes: Boxes) -> None:
    """CPU time of many short children counts; the next exec starts from nothing."""
    code = """
import os, time
while True:
    if os.fork() == 0:
        while time.process_time() < 0.2: pass
        os._exit(0)
    os.wait()
"""
    async with boxes.lease(spec(cpu_s=0.6, wall_s=15.0)) as box:
        result = await python(box, code)
        expect(result.verdict == "timeout_cpu", "children's time counts", result)
        result = await python(box, "print('next')")
        expect(result.verdict == "ok" and result.usage.cpu_s < 0.4, "the next exec starts from nothing", result)


async def s12_broken_box(boxes: Boxes) -> None:
    """Attacks on the box itself end in a box that works or in ``broken``; the next lease works."""
    attack = """
import os, shutil, signal
for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGSEGV, signal.SIGKILL):
    try: os.kill(1, number)
    except OSError: pass
for path in ('/bin', '/usr/sbin', '/usr/bin/python3', '/etc', '/work', '/tmp'):
    shutil.rmtree(path, ignore_errors=True)
    try: os.unlink(path)
    except OSError: pass
os.kill(-1, signal.SIGKILL)
"""
    async with boxes.lease(spec()) as box:
        first = await python(box, attack)
        second = await python(box, "print('still here')")
        whole = second.verdict == "ok" and second.stdout == b"still here\n"
        expect(whole or second.verdict == "broken", "no attack leaves a box that pretends", (first, second))
    async with boxes.lease(spec()) as box:
        result = await python(box, "print('fresh')")
        expect(result.stdout == b"fresh\n", "the next box is whole", result)


RESOURCES: dict[str, Case] = {
    "S1": s1_fork_bomb,
    "S2": s2_daemon,
    "S3": s3_held_stdout,
    "S4": s4_memory_bomb,
    "S5": s5_memory_file_systems,
    "S6": s6_disk,
    "S6-inodes": s6_inodes,
    "S7": s7_sparse_result,
    "S8": s8_endless_output,
    "S9": s9_flooded_stderr,
    "S10": s10_endless_time,
    "S11": s11_short_children,
    "S12": s12_broken_box,
    "S41": s41_memory_of_the_box,
}
