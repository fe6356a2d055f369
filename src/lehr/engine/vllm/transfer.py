"""How new weights reach a running vLLM server that is paused."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Protocol

from lehr.core.errors import DeadlineExceeded
from lehr.engine.base import EngineError
from lehr.engine.served.http import Server
from lehr.engine.served.process import HOST, free_port

INSIDE = Path(__file__).with_name("inside")
"""What runs in vLLM's own environment."""


class Transfer(Protocol):
    """Replaces the weights of a paused server."""

    async def send(self, server: Server, folder: Path) -> None:
        """Return once every worker has the weights of ``folder``, or raise :class:`EngineError`."""
        ...


class FromDisk:
    """Every worker reads the folder. Works wherever the server sees the same files.

    method: of the workers, ``lehr_reload`` where they have ``inside/lehr_workers.py``.
    """

    def __init__(self, method: str, timeout_s: float) -> None:
        self._method, self._timeout_s = method, timeout_s

    async def send(self, server: Server, folder: Path) -> None:
        """Let the workers read ``folder``."""
        body = {
            "method": self._method,
            "kwargs": {"weights_path": str(folder)},
            "timeout": self._timeout_s,
        }
        await server.post("/collective_rpc", body, timeout_s=self._timeout_s + 5)


class OverNccl:
    """A process in vLLM's environment reads the folder once and broadcasts it to the workers' accelerators.

    Written after the source of release 0.32 (``vllm.distributed.weight_transfer``) and not run: it needs an
    accelerator for the sender besides those of the workers. workers: how many the server has.
    """

    def __init__(self, python: Path, token: str, workers: int, timeout_s: float) -> None:
        self._python, self._token, self._workers, self._timeout_s = python, token, workers, timeout_s

    async def send(self, server: Server, folder: Path) -> None:
        """Broadcast the weights of ``folder``."""
        words = [
            str(INSIDE / "send.py"), server.url, str(folder / "model.safetensors"), HOST, str(free_port()),
            str(self._workers + 1), str(self._timeout_s),
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            str(self._python),
            *words,
            env={**os.environ, "LEHR_SERVER_TOKEN": self._token},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), self._timeout_s)
        except TimeoutError as error:
            raise DeadlineExceeded(f"sending {folder} to vLLM took more than {self._timeout_s:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            said = output.decode(errors="replace").strip().splitlines()[-3:]
            raise EngineError(f"sending {folder} to vLLM ended with {process.returncode}: {' '.join(said)}")
