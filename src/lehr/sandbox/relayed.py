"""A box whose files come as frames rather than as descriptors: what the relay said of them is judged here."""

from __future__ import annotations

from collections.abc import Mapping

from lehr.sandbox import collect
from lehr.sandbox.base import Entry
from lehr.sandbox.box import RunnerBox
from lehr.sandbox.errors import SandboxError
from lehr.sandbox.shell import PipeShell


class RelayedBox(RunnerBox):
    """Life cycle as any box's. Its process 1 runs ``inside/relay.py`` or a kind of it."""

    @property
    def limited(self) -> bool:
        """Programs are held to their limits by rlimits and the runner, the whole by a group around it."""
        return False

    async def read(self, path: str, *, limit_bytes: int = 1 << 20) -> bytes:
        """Return a regular file's content; see the protocol."""
        async with self._turn:
            answer = await self._ask({"op": "open", "path": path, "limit_bytes": limit_bytes}, path)
        facts = answer.header.get("facts")
        if not facts or len(facts) != 3 or not all(isinstance(fact, int) for fact in facts):
            raise SandboxError(f"the box did not say what {path} is")
        return collect.judge(
            answer.payload, path, limit_bytes, regular=bool(facts[0]), names=facts[1], size=facts[2]
        )

    async def tree(
        self, path: str = ".", *, limit_files: int = 4096, limit_bytes: int = 8 << 20
    ) -> Mapping[str, Entry]:
        """Return everything below ``path``; see the protocol."""
        request = {"op": "tree", "path": path, "limit_files": limit_files, "limit_bytes": limit_bytes}
        async with self._turn:
            answer = await self._ask(request, path)
        return collect.cut(answer.payload, answer.header.get("entries", ()), limit_files)

    async def _start_shell(self, terminal: bool) -> PipeShell:
        """No terminal of the host's can be lent to it."""
        if terminal:
            raise SandboxError(
                "a box of this backend has no shell on a terminal",
                expected="a plain shell, or the backend bwrap",
            )
        return await super()._start_shell(terminal)
