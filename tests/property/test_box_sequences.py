"""Random sequences of calls of a box, beside a model of what its files must be."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lehr.sandbox.base import Limits, Snapshot, Spec
from lehr.sandbox.box import RunnerBox
from lehr.sandbox.bwrap import BwrapBackend
from lehr.sandbox.errors import Refused, SandboxError

SPEC = Spec(limits=Limits(memory_bytes=96 << 20, disk_bytes=4 << 20, inodes=200, pids=16, wall_s=2.0))
NAMES = st.sampled_from(["a", "b", "d/e", "d/f/g", "odd name", "ü\n"])
DATA = st.binary(max_size=5000)


class BoxSequences(RuleBasedStateMachine):
    """The model is a mapping from names to contents, and one for each snapshot."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.backend: BwrapBackend
        self.box: RunnerBox
        self.files: dict[str, bytes] = {}
        self.marks: list[tuple[Snapshot, dict[str, bytes]]] = []
        self.dead = False

    def run_in_loop(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    @initialize()
    def make(self) -> None:
        async def begin() -> None:
            self.backend = BwrapBackend()
            self.box = await self.backend.create(SPEC)

        self.run_in_loop(begin())

    @precondition(lambda self: not self.dead)
    @rule(name=NAMES, data=DATA)
    def write(self, name: str, data: bytes) -> None:
        self.run_in_loop(self.box.write(name, data))
        self.files[name] = data

    @precondition(lambda self: not self.dead)
    @rule(name=NAMES, data=DATA, forked=st.booleans())
    def write_by_program(self, name: str, data: bytes, forked: bool) -> None:
        code = "import os, sys; p = sys.argv[1]; os.makedirs(os.path.dirname(p) or '.', exist_ok=True)"
        code += "; open(p, 'wb').write(sys.stdin.buffer.read())"
        python = ["python3"] if forked else ["/usr/bin/env", "python3"]
        result = self.run_in_loop(self.box.exec([*python, "-c", code, name], stdin=data))
        assert result.verdict == "ok", result
        self.files[name] = data

    @precondition(lambda self: not self.dead)
    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        result = self.run_in_loop(self.box.exec(["rm", "-f", name]))
        assert result.verdict == "ok", result
        self.files.pop(name, None)

    @precondition(lambda self: not self.dead)
    @rule(code=st.sampled_from([0, 1, 7, 255]), text=st.text(max_size=50))
    def exec_with_status(self, code: int, text: str) -> None:
        text = text.replace("\0", "").encode("utf-8", "ignore").decode()
        result = self.run_in_loop(
            self.box.exec(["sh", "-c", 'printf %s "$1"; exit "$2"', "sh", text, str(code)])
        )
        assert (result.verdict, result.exit_code) == ("exit" if code else "ok", code), result
        assert result.stdout == text.encode()

    @precondition(lambda self: not self.dead)
    @rule(seconds=st.floats(0.0, 0.1))
    def cancel(self, seconds: float) -> None:
        async def begin() -> None:
            running = asyncio.create_task(self.box.exec(["sh", "-c", "sleep 60 & sleep 60"]))
            await asyncio.wait([running], timeout=seconds)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        self.run_in_loop(begin())
        self.dead = self.box.broken

    @precondition(lambda self: not self.dead)
    @rule()
    def time_out(self) -> None:
        result = self.run_in_loop(self.box.exec(["sleep", "60"], timeout_s=0.05))
        assert result.verdict == "timeout_wall", result

    @precondition(lambda self: not self.dead)
    @rule()
    def shell(self) -> None:
        async def use() -> None:
            shell = await self.box.shell()
            result = await shell.run("(sleep 60 &) ; printf shell > a; echo $?")
            assert result.stdout == b"0\n", result
            await shell.close()

        self.run_in_loop(use())
        self.files["a"] = b"shell"

    @precondition(lambda self: not self.dead and len(self.marks) < 4)
    @rule()
    def snapshot(self) -> None:
        self.marks.append((self.run_in_loop(self.box.snapshot()), dict(self.files)))

    @precondition(lambda self: bool(self.marks))
    @rule(pick=st.integers(0, 3))
    def restore(self, pick: int) -> None:
        mark, files = self.marks[pick % len(self.marks)]
        self.run_in_loop(self.box.restore(mark))
        self.files, self.dead = dict(files), False

    @precondition(lambda self: bool(self.marks))
    @rule(pick=st.integers(0, 3))
    def twin(self, pick: int) -> None:
        """Another box of a snapshot holds its files, and what it does is its own."""
        mark, files = self.marks[pick % len(self.marks)]

        async def look() -> None:
            other = await self.backend.create(SPEC, mark)
            assert contents(await other.tree()) == files
            await other.exec(["sh", "-c", "rm -rf ./*; echo x > a"])
            await other.destroy()

        self.run_in_loop(look())

    @precondition(lambda self: bool(self.marks))
    @rule()
    def discard(self) -> None:
        mark, _ = self.marks.pop()
        self.run_in_loop(mark.discard())

    @precondition(lambda self: not self.dead)
    @rule()
    def kill(self) -> None:
        self.box.give_up()
        self.dead = True

    @precondition(lambda self: self.dead)
    @rule()
    def rebuild(self) -> None:
        """What a pool does with a broken box."""

        async def begin() -> None:
            await self.box.destroy()
            self.box = await self.backend.create(SPEC)

        self.run_in_loop(begin())
        self.files, self.dead = {}, False

    @invariant()
    def files_are_those_of_the_model(self) -> None:
        if not hasattr(self, "box"):
            return
        if not self.dead:
            assert contents(self.run_in_loop(self.box.tree())) == self.files
            return
        assert self.run_in_loop(self.box.exec(["true"])).verdict == "broken"
        try:
            self.run_in_loop(self.box.read("a"))
            raise AssertionError("a dead box was read")
        except (SandboxError, Refused):
            pass

    def teardown(self) -> None:
        async def end() -> None:
            if hasattr(self, "box"):
                await self.box.destroy()
                await self.backend.close()

        self.run_in_loop(end())
        self.loop.close()


def contents(tree: Any) -> dict[str, bytes]:
    return {name: data for name, data in tree.items() if data is not None}


BoxSequences.TestCase.settings = settings(
    max_examples=12,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestBoxSequences = BoxSequences.TestCase
