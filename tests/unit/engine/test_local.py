"""The engine behind the asynchronous protocol: whoever asks is answered, also while it ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

import pytest

from lehr.core.trace import Sampling
from lehr.engine.base import EngineBroken, EngineError
from lehr.engine.local import LocalEngine
from lehr.engine.native.engine import NativeEngine
from lehr.engine.native.request import Request
from lehr.engine.native.settings import NativeConfig
from lehr.model.tiny import random_decoder, tiny_config
from lehr.model.tokenizer import ByteTokenizer

LONG = Sampling(max_tokens=500, seed=1)


class _FailsOnce(NativeEngine):
    """Its first step fails, once it is let."""

    def __init__(self) -> None:
        super().__init__(
            random_decoder(tiny_config()), config=NativeConfig(dtype="float32"), tokenizer=ByteTokenizer()
        )
        self.stepping, self.may = threading.Event(), threading.Event()

    def step(self) -> list[Request]:
        if self.idle:
            return []
        self.stepping.set()
        self.may.wait(30)
        raise RuntimeError("a fault inside a step")


def sound() -> LocalEngine:
    return LocalEngine(
        NativeEngine(random_decoder(tiny_config()), config=NativeConfig(), tokenizer=ByteTokenizer())
    )


async def settled(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    """Return results and errors; fails where a task waits for an answer that does not come."""
    _, waits = await asyncio.wait(tasks, timeout=10)
    assert not waits, f"{len(waits)} of {len(tasks)} callers were never answered"
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_who_asks_during_the_step_that_breaks_the_engine_is_told_so() -> None:
    async def what() -> None:
        stepper = _FailsOnce()
        engine = LocalEngine(stepper)
        asking: list[Coroutine[Any, Any, Any]] = [engine.generate([1, 2], LONG)]
        tasks = [asyncio.create_task(work) for work in asking]
        await asyncio.to_thread(stepper.stepping.wait, 10)
        meanwhile = (
            engine.generate([3], LONG),
            engine.stats(),
            engine.score([1, 2]),
            engine.abort(),
            engine.pause(),
        )
        tasks += [asyncio.create_task(work) for work in meanwhile]
        left = asyncio.create_task(engine.generate([4], LONG))
        await asyncio.sleep(0.05)
        left.cancel()
        await asyncio.sleep(0.05)
        stepper.may.set()
        for answer in await settled(tasks):
            assert isinstance(answer, EngineBroken) and "a fault inside a step" in str(answer)
        with pytest.raises(asyncio.CancelledError):
            await left
        with pytest.raises(EngineBroken):
            await engine.generate([1], LONG)
        await engine.close()

    asyncio.run(what())


def test_who_asks_while_the_engine_closes_is_answered() -> None:
    async def what() -> None:
        for _ in range(5):
            engine = sound()
            tasks = [asyncio.create_task(engine.generate([1, 2, 3], LONG)) for _ in range(3)]
            await asyncio.sleep(0.02)
            closing = asyncio.create_task(engine.close())
            while not closing.done() and len(tasks) < 300:
                tasks += [asyncio.create_task(engine.generate([5], LONG)), asyncio.create_task(engine.stats())]
                await asyncio.sleep(0)
            await settled([*tasks, closing])
            assert closing.exception() is None
            for task in tasks:
                error = task.exception()
                assert error is None or (isinstance(error, EngineError) and "closed" in str(error))

    asyncio.run(what())


def test_a_caller_that_is_cancelled_after_the_engine_closed_is_cancelled() -> None:
    async def what() -> None:
        engine = sound()
        await engine.pause()
        waiting = asyncio.create_task(engine.generate([1], LONG))
        await engine.stats()
        with engine._wake:
            engine._closed = True
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        with engine._wake:
            engine._wake.notify()
        await asyncio.to_thread(engine._thread.join, 10)
        engine._stepper.close()

    asyncio.run(what())
