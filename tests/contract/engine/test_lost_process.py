"""Two engine processes behind a router, one of which is killed while it samples."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from lehr.cluster.base import Role
from lehr.cluster.local import LocalCluster
from lehr.core.errors import RoleLost
from lehr.core.trace import Sampling
from lehr.engine.native.settings import NativeConfig
from lehr.engine.remote import RemoteEngine
from lehr.engine.router import Router
from lehr.model.checkpoint import save_model
from lehr.model.tiny import random_decoder
from lehr.model.tokenizer import ByteTokenizer

SMALL = NativeConfig(max_running=8, cache_tokens=4096, dtype="float32")


@pytest.mark.timeout(300)
def test_a_killed_process_costs_no_request(tmp_path: Path) -> None:
    save_model(random_decoder(seed=1, std=0.2), tmp_path / "m", ByteTokenizer())

    async def go() -> None:
        cluster = LocalCluster(tmp_path)
        try:
            body = {"model": str(tmp_path / "m"), "native": SMALL.model_dump(), "threads": 1}
            roles = [Role(f"engine-{n}", "lehr.engine.role:build", body) for n in range(2)]
            handles = await asyncio.gather(*(cluster.start(role) for role in roles))
            router = Router([RemoteEngine(handle) for handle in handles], patience_s=0.5)
            prompts = [[*f"prompt {n}".encode()] for n in range(8)]

            async def all_of_them(tokens: int) -> list[list[int]]:
                wanted = (
                    router.generate(p, Sampling(max_tokens=tokens, seed=n)) for n, p in enumerate(prompts)
                )
                return [done.tokens.tolist() for done in await asyncio.gather(*wanted)]

            expected = await all_of_them(300)
            asking = asyncio.create_task(all_of_them(300))
            sampled = (await router.stats()).own_tokens
            while (await router.stats()).own_tokens < sampled + 8:
                await asyncio.sleep(0.01)
            assert not asking.done()
            os.kill(handles[1].pid, signal.SIGKILL)
            assert await asking == expected
            assert list(router.out) == [1] and "SIGKILL" in router.out[1]
            assert (await router.stats()).blocks_held == 0
            os.kill(handles[0].pid, signal.SIGKILL)
            with pytest.raises(RoleLost, match="engine-0"):
                await all_of_them(3)
            await router.close()
        finally:
            await cluster.close()

    asyncio.run(asyncio.wait_for(go(), 240))
