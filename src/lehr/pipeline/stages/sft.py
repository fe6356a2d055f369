"""Supervised fine-tuning, epoch by epoch, until what it is judged by stops getting better."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Sequence
from pathlib import Path

from lehr.core.batch import Batch, Sample
from lehr.core.errors import ConfigError
from lehr.pipeline.context import Context
from lehr.pipeline.conversations import Rendered, held_apart, read_conversations, render
from lehr.pipeline.demonstrations import demonstrations
from lehr.pipeline.epochs import epoch_batches, steps_per_epoch
from lehr.pipeline.measure import measure
from lehr.pipeline.recipe import SftStage

DATA_READ = "sft.data"
"""The event that says what was taken from a file of conversations."""


async def run_sft(ctx: Context, stage: SftStage, start: Path) -> None:
    """Train from ``start`` and leave the best epoch's weights in the trainer.

    Best is the highest mean validation rate over domains, or the lowest loss of the conversations that were
    held out; ties go to the later epoch. A stage that was interrupted begins again from ``start``: it is short
    and repeats exactly.
    """
    await ctx.trainer.load(start, optimizer=False)
    samples, held_out = await training_set(ctx, stage)
    steps = steps_per_epoch(samples, stage.batch_size) * stage.max_epochs
    await ctx.trainer.reset(stage.train.within(steps))
    best_path = ctx.folder.checkpoints / f".{stage.name}-best"
    best, since_best, step = -math.inf, 0, 0
    for epoch in range(stage.max_epochs):
        step = await train_epoch(ctx, stage, samples, epoch, step)
        score = await _judge(ctx, stage, held_out, step)
        if score >= best:
            since_best = 0 if score > best else since_best + 1
            best = score
            await ctx.trainer.save(best_path, resumable=False)
        else:
            since_best += 1
        if since_best >= stage.patience and epoch + 1 < stage.max_epochs:
            rate = stage.judged_by == "rate"
            told = (
                f"validation rate stopped rising at {best:.0%}"
                if rate
                else f"loss stopped falling at {-best:.3f}"
            )
            ctx.observer.note(f"{told} after {epoch + 1} epochs")
            break
    await ctx.trainer.load(best_path, optimizer=False)


async def training_set(ctx: Context, stage: SftStage) -> tuple[list[Sample], list[Sample]]:
    """Return what the stage trains on, and what of its file is held out."""
    gold = await demonstrations(ctx.domains, stage.from_gold, ctx.renderer, ctx.pool)
    if gold:
        ctx.observer.note(f"{len(gold)} demonstrations over {len(ctx.domains)} domains")
    if not stage.data:
        return gold, []
    found = await asyncio.to_thread(_from_file, ctx, stage)
    kept, held_out = held_apart(found.samples, stage.heldout_share, ctx.recipe.seed)
    told = [f"{len(kept)} conversations", f"{len(held_out)} held out"]
    told += [f"{found.cut} cut at {stage.max_tokens} tokens"] if found.cut else []
    told += [f"{found.refused} of more than {stage.max_tokens} tokens left out"] if found.refused else []
    ctx.observer.note(f"{stage.data}: {', '.join(told)}")
    ctx.ledger.event(
        DATA_READ,
        stage=stage.name,
        file=stage.data,
        digest=hashlib.blake2b(Path(stage.data).read_bytes(), digest_size=16).hexdigest(),
        trained=len(kept),
        held_out=len(held_out),
        cut=found.cut,
        refused=found.refused,
    )
    return [*gold, *kept], held_out


def _from_file(ctx: Context, stage: SftStage) -> Rendered:
    conversations = read_conversations(Path(stage.data), ctx.renderer)
    found = render(conversations, ctx.renderer, max_tokens=stage.max_tokens, too_long=stage.too_long)
    if not found.samples:
        raise ConfigError(
            f"all {found.refused} conversations of {stage.data} have more than {stage.max_tokens} tokens",
            expected="at least one that fits",
            hint="Raise max_tokens, or set too_long='cut'.",
        )
    return found


async def train_epoch(ctx: Context, stage: SftStage, samples: Sequence[Sample], epoch: int, step: int) -> int:
    """Take the steps of one epoch. Returns the number of the next step."""
    await ctx.allot(trainer=ctx.division.training)
    per_epoch = steps_per_epoch(samples, stage.batch_size)
    ctx.observer.stage(f"{stage.name} epoch {epoch + 1}", per_epoch, "steps")
    batches = epoch_batches(
        samples, epoch=epoch, batch_size=stage.batch_size, seed=ctx.recipe.seed, first_step=step
    )
    for number, batch in enumerate(batches, start=1):
        begun = time.monotonic()
        result = await ctx.trainer.step(batch)
        values = {f"{stage.name}/{k}": v for k, v in result.metrics.items()}
        ctx.metrics.write(stage.name, step, {**values, "time/training_s": time.monotonic() - begun})
        step += 1
        ctx.observer.advance(number, per_epoch, loss=round(result.metrics.get("loss", 0.0), 3))
    return step


async def _judge(ctx: Context, stage: SftStage, held_out: Sequence[Sample], step: int) -> float:
    """Measure what can be, and return what decides; more is better."""
    loss = 0.0
    if held_out:
        loss = (await ctx.trainer.evaluate(Batch(step, "sft", tuple(held_out)))).metrics["loss"]
        ctx.metrics.write(stage.name, step, {f"{stage.name}/heldout_loss": loss})
        ctx.observer.note(f"held-out loss {loss:.3f}")
    if stage.judged_by == "loss":
        return -loss
    await ctx.sync_weights()
    label, count = f"{stage.name} validation", stage.validation_count
    rates = await measure(ctx, label, split="validation", count=count, record=False)
    values = {f"{stage.name}/validation/{name}": rate for name, rate in rates.items()}
    ctx.metrics.write(stage.name, step, values)
    return sum(rates.values()) / max(1, len(rates))
