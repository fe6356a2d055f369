"""Sessions: a shell that keeps its state, whose exit codes cannot be forged and whose end is noticed."""

from __future__ import annotations

import time

from lehr.sandbox.base import Boxes
from lehr.sandbox.conformance.basis import Case, expect, spec

LATE_S = 0.5
BY_NAME = "echo out > /dev/stdout; echo err > /dev/stderr"
WRITE_ALL = """
import os
for fd in range(3, 1024):
    try: os.write(fd, b"0 0\\n")
    except OSError: pass
"""


async def s31_forged_status(boxes: Boxes) -> None:
    """Imitating, closing or flooding what the shell reports on changes no exit code."""
    imitations = (
        "echo 0 >&9; echo 'x 0' >&8; printf '%s\\n' 0 0 0; false",
        f"python3 -I -c '{WRITE_ALL}'; false",
        "exec 9>&- 8<&-; false",
        "for fd in 8 9; do echo 'x 0' > /proc/$$/fd/$fd; done; false",
        "sh -c 'exit 1'",
    )
    async with boxes.lease(spec()) as box:
        shell = await box.shell()
        expect((await shell.run("x=5; cd /tmp")).verdict == "ok", "a shell runs commands")
        for command in imitations:
            result = await shell.run(command)
            expect(
                result.verdict == "exit" and result.exit_code == 1,
                "a status is not forgeable",
                (command, result),
            )
        result = await shell.run("echo $x; pwd")
        expect(result.stdout == b"5\n/tmp\n", "the shell keeps its state", result)
        result = await shell.run("exit 7")
        expect(result.exit_code == 7, "a shell's own end has a status", result)
        result = await shell.run("true")
        expect(result.verdict == "broken", "an ended shell is noticed", result)
        other = await box.shell()
        result = await other.run("kill -9 $$")
        expect(result.verdict in ("signal", "broken"), "a killed shell is noticed", result)
        expect((await other.run("true")).verdict == "broken", "and stays ended")


async def s32_input_and_children(boxes: Boxes) -> None:
    """A bare cat sees the end of its input; streams open by name; heredocs and children return; limits hold."""
    async with boxes.lease(spec(wall_s=5.0)) as box:
        result = await box.exec(["sh", "-c", f"cat /dev/stdin; {BY_NAME}"], stdin=b"in\n")
        seen = result.stdout, result.stderr
        expect(seen == (b"in\nout\n", b"err\n"), "a program opens its streams by name", result)
        result = await box.exec(["cat"])
        expect(result.verdict == "ok" and result.usage.wall_s < 2, "cat sees end of file", result)
        shell = await box.shell()
        for command, output in (
            ("cat", b""),
            ("cat <<EOT\na\nb\nEOT", b"a\nb\n"),
            ("sleep 30 & echo on", b"on\n"),
            (BY_NAME, b"out\n"),
        ):
            result = await shell.run(command)
            expect(result.verdict == "ok" and result.stdout == output, "the command returns", (command, result))
            expect(result.usage.wall_s < 2, "it returns at once", (command, result.usage))
        started = time.monotonic()
        result = await shell.run("sleep 30", timeout_s=1.0)
        seconds = time.monotonic() - started
        expect(result.verdict == "timeout_wall", "a shell's limit ends its command", result)
        expect(1.0 <= seconds <= 1.0 + LATE_S, "it ends in time", seconds)
        result = await shell.run("echo back")
        expect(result.stdout == b"back\n", "the session goes on after a timeout", result)
        result = await shell.run("while :; do :; done", timeout_s=0.5)
        expect(result.verdict == "timeout_wall", "a loop of the shell itself ends too", result)


async def s33_partial_output(boxes: Boxes) -> None:
    """Output up to a timeout is returned."""
    async with boxes.lease(spec()) as box:
        result = await box.exec(["sh", "-c", "echo out; echo err >&2; sleep 30"], timeout_s=0.5)
        expect(result.verdict == "timeout_wall", "it ends by time", result)
        expect((result.stdout, result.stderr) == (b"out\n", b"err\n"), "what it wrote is kept", result)
        shell = await box.shell()
        result = await shell.run("echo out; echo err >&2; sleep 30", timeout_s=0.5)
        expect(result.stdout == b"out\n" and b"err\n" in result.stderr, "in a shell too", result)


SESSIONS: dict[str, Case] = {"S31": s31_forged_status, "S32": s32_input_and_children, "S33": s33_partial_output}
