"""Thousands of requests of random sizes at an engine that is too small for them, with cancels, new weights and
drafts: none may be lost, and memory must stay flat. ``make soak-engine REQUESTS=30000``.

A request counts as lost when it neither returns nor raises what its caller provoked. Resident memory is read
at half and at the end: before, oneDNN still fills its cache of a thousand compiled products. A request to
the real model takes seconds; this one takes milliseconds, so that 30,000 of them are about two hours of a busy
server.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from lehr.core.threads import share_cores

share_cores(os.environ)

from lehr.core.batch import Manifest  # noqa: E402
from lehr.core.errors import DeadlineExceeded  # noqa: E402
from lehr.core.trace import Sampling, Version  # noqa: E402
from lehr.engine.base import RequestTooLarge  # noqa: E402
from lehr.engine.local import LocalEngine, open_engine  # noqa: E402
from lehr.engine.native.settings import NativeConfig  # noqa: E402
from lehr.model.checkpoint import file_digest, save_model  # noqa: E402
from lehr.model.tiny import random_decoder  # noqa: E402
from lehr.model.tokenizer import ByteTokenizer  # noqa: E402

CALLERS, SWAP_EVERY, GROWTH = 48, 500, 1.05
CONFIG = NativeConfig(max_running=16, cache_tokens=4096, token_budget=256, draft_tokens=4, dtype="float32")


def resident_mib() -> float:
    """Return this process's resident set."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


class Soak:
    """What was sent and what came of it."""

    def __init__(self, engine: LocalEngine, manifests: list[Manifest], total: int) -> None:
        self._engine, self._manifests, self._total = engine, manifests, total
        self._draw = random.Random(0)
        self._prefixes = [[self._draw.randrange(256) for _ in range(200)] for _ in range(8)]
        self._next = 0
        self.ended: Counter[str] = Counter()
        self.queued: list[float] = []
        self.faults: list[str] = []

    async def caller(self) -> None:
        """Send one request after another until all are sent."""
        while self._next < self._total:
            self._next += 1
            kind = self._draw.choices(
                ("whole", "cancelled", "aborted", "late", "too large"), (80, 10, 4, 3, 3)
            )[0]
            prefix = self._draw.choice(self._prefixes)[: self._draw.randrange(200)]
            prompt = [*prefix, *(self._draw.randrange(256) for _ in range(self._draw.randrange(1, 60)))]
            most = 5000 if kind == "too large" else self._draw.randrange(0, 60)
            sampling = Sampling(
                max_tokens=most, temperature=self._draw.choice((0.0, 1.0)), top_p=self._draw.choice((0.9, 1.0)),
                seed=self._next,
            )  # fmt: skip
            self.ended[kind] += 1
            try:
                await self._one(kind, prompt, sampling)
            except Exception as error:
                self.faults.append(f"{kind}: {error!r}")

    async def _one(self, kind: str, prompt: list[int], sampling: Sampling) -> None:
        session = f"soak-{self._next}"
        timeout_s = 0.01 if kind == "late" else 120.0
        call = asyncio.ensure_future(
            self._engine.generate(prompt, sampling, session=session, timeout_s=timeout_s)
        )
        if kind == "cancelled":
            await asyncio.sleep(self._draw.random() * 0.05)
            call.cancel()
        elif kind == "aborted":
            await asyncio.sleep(self._draw.random() * 0.05)
            await self._engine.abort(session)
        try:
            done = await call
        except asyncio.CancelledError:
            expected = kind == "cancelled"
        except DeadlineExceeded:
            expected = kind == "late"
        except RequestTooLarge:
            expected = kind == "too large"
        else:
            expected = kind != "too large"
            self.queued.append(done.seconds["queue"])
            if done.stop == "length" and len(done.tokens) != sampling.max_tokens:
                self.faults.append(f"{len(done.tokens)} tokens of {sampling.max_tokens}")
            if not len(done.tokens) == len(done.logprobs) == len(done.versions):
                self.faults.append("a token without its log-probability or version")
            if list(done.versions) != sorted(done.versions):
                self.faults.append("a version fell within a completion")
        if not expected:
            self.faults.append(f"{kind}: ended in another way than its caller made it end")

    async def swapper(self) -> None:
        """Publish new weights after every ``SWAP_EVERY`` requests."""
        for manifest in self._manifests:
            while self._next < min(self._total, SWAP_EVERY * manifest.version.n):
                await asyncio.sleep(0.05)
            if self._next >= self._total:
                return
            await self._engine.fetch(manifest)
            await self._engine.activate(manifest.version, self._draw.choice(("keep", "recompute")))


async def soak(total: int) -> int:
    """Run, print what came of it, and return an exit status."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        save_model(random_decoder(seed=0, std=0.2), folder, ByteTokenizer())
        file = folder / "model.safetensors"
        manifests = [
            Manifest(Version(0, n), str(file), file_digest(file), file.stat().st_size)
            for n in range(1, total // SWAP_EVERY + 1)
        ]
        engine = open_engine(folder, CONFIG)
        run = Soak(engine, manifests, total)
        started, early = time.monotonic(), 0.0
        tasks = [asyncio.create_task(run.caller()) for _ in range(CALLERS)]
        tasks.append(asyncio.create_task(run.swapper()))
        try:
            while not all(t.done() for t in tasks):
                await asyncio.wait(tasks, timeout=5)
                sent = run._next
                early = early or (resident_mib() if sent > total / 2 else 0.0)
                rate = sent / (time.monotonic() - started)
                print(
                    f"  {sent} of {total}, {rate:.0f} a second, {(total - sent) / rate:.0f} s left, "
                    f"{resident_mib():.0f} MiB",
                    flush=True,
                )
            await asyncio.gather(*tasks)
            stats = await engine.stats()
        finally:
            await engine.close()
    late = resident_mib()
    queued = sorted(run.queued)
    p50, p99 = (queued[int(len(queued) * share)] * 1e3 for share in (0.5, 0.99))
    for kind, count in run.ended.most_common():
        print(f"  {count:7}  {kind}")
    print(f"  queue time p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    print(f"  resident memory {early:.0f} MiB at half, {late:.0f} MiB at the end")
    free = stats.blocks_free + stats.blocks_cached
    print(f"  {stats.blocks_held} blocks held, {free} of {stats.blocks_total} free or cached")
    lost = total - sum(run.ended.values())
    print(f"  {lost} lost, {len(run.faults)} faults")
    for fault in run.faults[:10]:
        print(f"    {fault}")
    if late > early * GROWTH:
        print(f"  memory grew by more than {GROWTH - 1:.0%}")
    return int(bool(lost or run.faults or stats.blocks_held or late > early * GROWTH))


if __name__ == "__main__":
    sys.exit(asyncio.run(soak(int(sys.argv[1]) if len(sys.argv) > 1 else 30_000)))
