"""Collecting results: what is not plainly a file of the program's own is refused, and nothing hangs."""

from __future__ import annotations

import asyncio

from lehr.sandbox.base import Box, Boxes, Unread
from lehr.sandbox.conformance.basis import Case, expect, python, spec
from lehr.sandbox.errors import Refused


async def refused(box: Box, path: str) -> str:
    """Return an empty text if reading ``path`` is refused soon, else what came instead."""
    try:
        async with asyncio.timeout(3):
            return f"{path}: {(await box.read(path))[:100]!r}"
    except Refused:
        return ""
    except TimeoutError:
        return f"{path}: reading hangs"


async def s25_symlinks(boxes: Boxes) -> None:
    """A link in place of the result or of a folder above it is refused."""
    code = """
import os
os.symlink('/etc/passwd', 'result')
os.symlink('/etc', 'folder')
os.symlink('/proc/self/root', 'root')
open('real', 'w').write('real')
os.symlink('real', 'near')
os.mkdir('inner')
open('inner/file', 'w').write('inner')
os.symlink('inner', 'way')
"""
    async with boxes.lease(spec()) as box:
        await python(box, code)
        for path in ("result", "folder/passwd", "root/etc/passwd", "near", "way/file"):
            seen = await refused(box, path)
            expect(not seen, "no link is followed", seen)
        expect(await box.read("real") == b"real", "a real file is read")
        tree = await box.tree()
        taken = {path for path, entry in tree.items() if not isinstance(entry, Unread)}
        expect(taken == {"real", "inner", "inner/file"}, "a tree follows no link", tree)
        links = {"result", "folder", "root", "near", "way"}
        expect({path for path in tree if tree[path] == Unread("link")} == links, "a tree tells of links", tree)


async def s26_hard_links(boxes: Boxes) -> None:
    """A file with a second name is refused; files of the system cannot be given one."""
    code = """
import os
open('one', 'w').write('x')
os.link('one', 'two')
try: os.link('/etc/passwd', 'three'); print('linked')
except OSError: pass
"""
    async with boxes.lease(spec()) as box:
        result = await python(box, code)
        expect(result.stdout == b"", "a file of the system cannot be linked", result)
        for path in ("one", "two"):
            seen = await refused(box, path)
            expect(not seen, "a hard link is refused", seen)


async def s27_special_files(boxes: Boxes) -> None:
    """FIFO, socket, folder and device in the result's place are refused without waiting."""
    code = """
import os, socket
os.mkfifo('fifo')
socket.socket(socket.AF_UNIX).bind('socket')
os.mkdir('folder')
"""
    async with boxes.lease(spec()) as box:
        result = await python(box, code)
        expect(result.verdict == "ok", "special files can be made", result)
        for path in ("fifo", "socket", "folder", "/dev/zero", "absent"):
            seen = await refused(box, path)
            expect(not seen, "only files are read", seen)
        try:
            async with asyncio.timeout(3):
                await box.write("fifo", b"data")
            wrote = "wrote into a FIFO"
        except Refused:
            wrote = ""
        expect(not wrote, "nor is anything but a file written", wrote)


async def s28_swapped(boxes: Boxes) -> None:
    """While a program swaps a file for a link again and again, a read yields the file or a refusal."""
    turns = "ln -sfn /tmp/other result; rm -f result; printf mine > fresh; mv fresh result"
    swap = f"while :; do {turns}; done >/dev/null 2>&1 &"
    async with boxes.lease(spec()) as box:
        shell = await box.shell()
        await box.write("/tmp/other", b"theirs")
        await shell.run(swap)
        for _ in range(100):
            try:
                data = await box.read("result")
            except Refused:
                continue
            expect(data in (b"mine", b""), "only the program's own file is read", data)
        await shell.close()


COLLECTING: dict[str, Case] = {
    "S25": s25_symlinks,
    "S26": s26_hard_links,
    "S27": s27_special_files,
    "S28": s28_swapped,
}
