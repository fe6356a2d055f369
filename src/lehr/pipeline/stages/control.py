"""The control: more SFT on the same demonstrations for the compute that other stages got."""

from __future__ import annotations

import time
from pathlib import Path

from lehr.pipeline.context import Context
from lehr.pipeline.demonstrations import demonstrations
from lehr.pipeline.epochs import epoch_batches, steps_per_epoch
from lehr.pipeline.recipe import ControlStage, SftStage
from lehr.pipeline.stages.sft import training_set


async def run_control(ctx: Context, stage: ControlStage, start: Path) -> None:
    """Go on with SFT from the checkpoint of ``stage.after`` for the seconds that ``stage.match`` took.

    ``start`` (the latest checkpoint) is not used: the control branches off earlier.
    """
    del start
    source = next(s for s in ctx.recipe.stages if s.name == stage.after)
    budget_s = sum(ctx.ledger.stage_seconds(name) for name in stage.match)
    await ctx.trainer.load(ctx.folder.require_checkpoint(stage.after), optimizer=False)
    await ctx.trainer.reset(stage.train)
    await ctx.allot(trainer=ctx.division.training)
    if isinstance(source, SftStage):
        samples, _ = await training_set(ctx, source)
    else:
        samples = await demonstrations(ctx.domains, 128, ctx.renderer, ctx.pool)
    per_epoch = steps_per_epoch(samples, stage.batch_size)
    ctx.observer.stage(stage.name, round(budget_s), "s")
    begun, step, epoch = time.monotonic(), 0, 0
    while time.monotonic() - begun < budget_s:
        for batch in epoch_batches(
            samples, epoch=epoch, batch_size=stage.batch_size, seed=ctx.recipe.seed, first_step=step
        ):
            result = await ctx.trainer.step(batch)
            step += 1
            spent = time.monotonic() - begun
            ctx.metrics.write(stage.name, step, {f"{stage.name}/{k}": v for k, v in result.metrics.items()})
            ctx.observer.advance(
                round(min(spent, budget_s)),
                round(budget_s),
                epoch=round(step / per_epoch, 1),
                loss=round(result.metrics.get("loss", 0.0), 3),
            )
            if spent >= budget_s:
                break
        epoch += 1
    ctx.observer.note(f"control: {step} more SFT steps in {budget_s:.0f} s")
