"""Neighbours: two boxes alive at once, and the host, cannot reach each other; a lease ends in time."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import tempfile
import time

from lehr.core.errors import DeadlineExceeded
from lehr.sandbox.base import Box, Boxes, Unread
from lehr.sandbox.conformance.basis import Case, expect, expect_works, python, spec

RELEASE_S = 4.5
"""Below the five seconds after which a pool gives up, so that a release that was given up counts as late."""

MAKE = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
open('/dev/shm/mark', 'w').write('theirs')
open('/tmp/mark', 'w').write('theirs')
for call in (lambda: libc.shmget(0x1e49, 4096, 0o1666), lambda: libc.msgget(0x1e49, 0o1666),
             lambda: libc.semget(0x1e49, 1, 0o1666)):
    call()
print('made', flush=True)
time.sleep(20)
"""

LOOK = """
import ctypes, json, os, signal
libc = ctypes.CDLL(None, use_errno=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
seen = {
    'shm file': os.path.exists('/dev/shm/mark'), 'tmp file': os.path.exists('/tmp/mark'),
    'shm': libc.shmget(0x1e49, 4096, 0o666) >= 0, 'msg': libc.msgget(0x1e49, 0o666) >= 0,
    'sem': libc.semget(0x1e49, 1, 0o666) >= 0,
    'processes': [p for p in os.listdir('/proc') if p.isdigit() and int(p) not in (1, os.getpid())],
}
try: os.kill(-1, signal.SIGTERM)
except OSError: pass
print(json.dumps(seen))
"""


async def s21_neighbours(boxes: Boxes) -> None:
    """Processes, System V memory, queues and semaphores, /dev/shm and /tmp of another box are not there."""
    async with boxes.lease(spec()) as theirs, boxes.lease(spec()) as ours:
        running = asyncio.create_task(python(theirs, MAKE))
        await asyncio.sleep(0.7)
        result = await python(ours, LOOK)
        seen = json.loads(result.stdout or b"{}")
        reached = {name: what for name, what in seen.items() if what}
        expect(bool(seen) and not reached, "nothing of the neighbour is there", reached or result)
        expect(not running.done(), "the neighbour was not ended", running)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        expect(await theirs.read("/tmp/mark") == b"theirs", "nor are its files touched")


async def s22_unix_sockets(boxes: Boxes) -> None:
    """Sockets of the host and of a neighbour, by path or abstract, cannot be connected to."""
    name = f"lehr-{secrets.token_hex(4)}"
    serve = f"""
import socket, time
held = [socket.socket(socket.AF_UNIX) for _ in range(2)]
held[0].bind('/tmp/{name}'); held[1].bind('\\0{name}-box')
for s in held: s.listen()
time.sleep(20)
"""
    with (
        tempfile.TemporaryDirectory() as folder,
        socket.socket(socket.AF_UNIX) as path,
        socket.socket(socket.AF_UNIX) as abstract,
    ):
        path.bind(f"{folder}/{name}")
        abstract.bind(f"\0{name}")
        for server in (path, abstract):
            server.listen()
        connect = f"""
import socket
reached = []
for address in ('{folder}/{name}', '/tmp/{name}', '\\0{name}', '\\0{name}-box', '/run/docker.sock',
                '/var/run/docker.sock', '/run/dbus/system_bus_socket'):
    with socket.socket(socket.AF_UNIX) as s:
        try: s.connect(address); reached.append(address)
        except OSError: pass
print(reached)
"""
        async with boxes.lease(spec()) as theirs, boxes.lease(spec()) as ours:
            running = asyncio.create_task(python(theirs, serve))
            await asyncio.sleep(0.5)
            expect(not running.done(), "the neighbour serves", running)
            result = await python(ours, connect)
            expect(result.stdout == b"[]\n", "no socket outside is reached", result)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def s29_hostile_archives(boxes: Boxes) -> None:
    """A tree that an archive made holds the box's own files alone: no link is followed, no name leads out."""
    code = """
import io, os, tarfile
buffer = io.BytesIO()
with tarfile.open(fileobj=buffer, mode='w') as tar:
    def add(name, kind=tarfile.REGTYPE, link='', mode=0o644, data=b'data'):
        info = tarfile.TarInfo(name)
        info.type, info.linkname, info.mode = kind, link, mode
        info.size = len(data) if kind == tarfile.REGTYPE else 0
        tar.addfile(info, io.BytesIO(data))
    add('plain'); add('setuid', mode=0o6755); add('../../above'); add('/absolute')
    add('one', tarfile.SYMTYPE, '/etc'); add('two', tarfile.SYMTYPE, 'one'); add('two/passwd2')
    add('chain', tarfile.SYMTYPE, '../../../../etc/passwd'); add('hard', tarfile.LNKTYPE, 'plain')
    add('fifo', tarfile.FIFOTYPE); add('inner/file')
buffer.seek(0)
os.mkdir('out')
trusting = {'filter': 'fully_trusted'} if hasattr(tarfile, 'fully_trusted_filter') else {}
with tarfile.open(fileobj=buffer) as tar:
    for member in tar:
        try: tar.extract(member, 'out', **trusting)
        except OSError: pass
print(sorted(os.listdir('out')))
"""
    async with boxes.lease(spec()) as box:
        result = await python(box, code)
        expect(b"chain" in result.stdout, "the archive is unpacked", result)
        found = await box.tree("out")
        tree = {path: entry for path, entry in found.items() if not isinstance(entry, Unread)}
        expect(set(tree) <= {"plain", "hard", "setuid", "inner", "inner/file"}, "only plain files", tree)
        expect({"setuid", "inner", "inner/file"} <= set(tree), "all plain files", tree)
        contents = {data for data in tree.values() if data is not None}
        expect(contents == {b"data"}, "their own contents", contents)


async def s30_stubborn_trees(boxes: Boxes) -> None:
    """A tree of mode 000, ten thousand folders deep, with odd names, is refused and goes with its box."""
    code = """
import os
for name in (b'new\\nline', b'\\xff\\xfe', b'-rf', b'a b', b"'", b'\\x01'): open(name, 'w').write('x')
os.mkdir('closed'); open('closed/file', 'w').write('x'); os.chmod('closed', 0)
made = 0
try:
    while made < 10000:
        os.mkdir('d'); os.chdir('d'); made += 1
except OSError: pass
print(made)
"""
    limits = {"inodes": 12_000, "disk_bytes": 64 << 20, "wall_s": 60.0, "cpu_s": 60.0}
    async with boxes.lease(spec(**limits)) as box:
        result = await python(box, code)
        expect(int(result.stdout) >= 10_000, "the tree is made", result)
        async with asyncio.timeout(5):
            try:
                await box.tree()
            except Exception as error:
                expect(
                    "deeper" in str(error) or "too long" in str(error) or "more than" in str(error),
                    "why",
                    error,
                )
        expect(await box.read("-rf") == b"x", "odd names are read")
        begun = time.monotonic()
    expect(time.monotonic() - begun < RELEASE_S, "the box goes in time", time.monotonic() - begun)
    async with boxes.lease(spec()) as box:
        expect(await box.tree() == {}, "the next box is empty")


async def s36_zombies(boxes: Boxes) -> None:
    """Orphans and zombies of hundreds of execs are collected; the number of processes stays flat."""
    orphans = "for i in 1 2 3 4 5; do (true &) ; done"
    async with boxes.lease(spec(pids=24)) as box:
        for number in range(200):
            result = await box.exec(["sh", "-c", orphans])
            expect(result.verdict == "ok", "each exec runs", (number, result))
        shell = await box.shell()
        for _ in range(50):
            result = await shell.run(orphans)
            expect(result.verdict == "ok", "each command runs", result)
        await shell.close()
        await expect_works(box, "hundreds of execs")


async def s37_more_leases_than_boxes(boxes: Boxes) -> None:
    """Who asks for more boxes than there are waits in line, or is told why in time; nobody is forgotten."""

    async def one(number: int) -> bool:
        async with boxes.lease(spec(), timeout_s=30.0) as box:
            return (await box.exec(["echo", str(number)])).stdout == b"%d\n" % number

    served = await asyncio.gather(*(one(number) for number in range(20)))
    expect(all(served), "everybody in line is served", served)
    held: list[Box] = []
    begun = time.monotonic()
    try:
        for _ in range(64):
            held.append(await boxes.acquire(spec(), timeout_s=0.3 if len(held) > 1 else 5.0))
    except DeadlineExceeded as error:
        expect("leased" in str(error) or "ready" in str(error), "the reason is given", error)
        expect(time.monotonic() - begun < 20, "in time", time.monotonic() - begun)
    finally:
        for box in held:
            await boxes.release(box)
    expect(await one(7), "afterwards there are boxes again")


async def s39_release_in_time(boxes: Boxes) -> None:
    """Release returns in time though what runs in the box has stopped, ignores signals, or forks."""
    attacks = (
        "import os, signal\nfor _ in range(8): os.fork()\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import signal\nfor n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except OSError: pass\nwhile True: pass",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    )
    for attack in attacks:
        box = await boxes.acquire(spec())
        running = asyncio.create_task(python(box, attack))
        await asyncio.sleep(0.3)
        begun = time.monotonic()
        await boxes.release(box)
        taken = time.monotonic() - begun
        expect(taken < RELEASE_S, "release returns in time", (attack, taken))
        done, _ = await asyncio.wait([running], timeout=3)
        expect(bool(done), "and the exec with it", attack)
        running.exception() if not running.cancelled() else None


NEIGHBOURS: dict[str, Case] = {
    "S21": s21_neighbours,
    "S22": s22_unix_sockets,
    "S29": s29_hostile_archives,
    "S30": s30_stubborn_trees,
    "S36": s36_zombies,
    "S37": s37_more_leases_than_boxes,
    "S39": s39_release_in_time,
}
