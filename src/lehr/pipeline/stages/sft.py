"""Supervised fine-tuning until the validation rate stops rising."""

from __future__ import annotations

import time
from pathlib import Path

from lehr.pipeline.context import Context
from lehr.pipeline.demonstrations import demonstrations
from lehr.pipeline.epochs import epoch_batches, steps_per_epoch
from lehr.pipeline.measure import measure
from lehr.pipeline.recipe import SftStage


async def run_sft(ctx: Context, stage: SftStage, start: Path) -> None:
    """Train on demonstrations from ``start`` and leave the best epoch's weights in the trainer.

    Best is the highest mean validation rate over domains; ties go to the later epoch, whose loss is
    lower. A stage that was interrupted begins again from ``start``: it is short and repeats exactly.
    """
    await ctx.trainer.load(start, optimizer=False)
    await ctx.trainer.reset(stage.train)
    samples = await demonstrations(ctx.domains, stage.demonstrations, ctx.renderer, ctx.pool)
    ctx.observer.note(f"{len(samples)} demonstrations over {len(ctx.domains)} domains")
    best_path = ctx.folder.checkpoints / f".{stage.name}-best"
    best, since_best, step = -1.0, 0, 0
    per_epoch = steps_per_epoch(samples, stage.batch_size)
    for epoch in range(stage.max_epochs):
        await ctx.allot(trainer=ctx.division.training)
        ctx.observer.stage(f"{stage.name} epoch {epoch + 1}", per_epoch, "steps")
        for number, batch in enumerate(
            epoch_batches(
                samples, epoch=epoch, batch_size=stage.batch_size, seed=ctx.recipe.seed, first_step=step
            ),
            start=1,
        ):
            begun = time.monotonic()
            result = await ctx.trainer.step(batch)
            ctx.metrics.write(
                stage.name,
                step,
                {
                    **{f"{stage.name}/{k}": v for k, v in result.metrics.items()},
                    "time/training_s": time.monotonic() - begun,
                },
            )
            step += 1
            ctx.observer.advance(number, per_epoch, loss=round(result.metrics.get("loss", 0.0), 3))
        await ctx.sync_weights()
        rates = await measure(
            ctx,
            f"{stage.name} validation",
            split="validation",
            count=stage.validation_count,
            record=False,
        )
        mean = sum(rates.values()) / max(1, len(rates))
        ctx.metrics.write(
            stage.name, step, {f"{stage.name}/validation/{name}": rate for name, rate in rates.items()}
        )
        if mean >= best:
            since_best = 0 if mean > best else since_best + 1
            best = mean
            await ctx.trainer.save(best_path, resumable=False)
        else:
            since_best += 1
        if since_best >= stage.patience:
            ctx.observer.note(f"validation rate stopped rising at {best:.0%} after {epoch + 1} epochs")
            break
    await ctx.trainer.load(best_path, optimizer=False)
