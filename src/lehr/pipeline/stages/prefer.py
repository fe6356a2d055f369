"""Learning from pairs: DPO and IPO, and the reward model that is trained on the same pairs."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lehr.core.batch import LossName, Sample
from lehr.core.errors import ConfigError
from lehr.evals.stats import wilson
from lehr.pipeline.attempts import attempt
from lehr.pipeline.beside import open_beside, over_tokens, score_all
from lehr.pipeline.context import Context
from lehr.pipeline.models import context_tokens
from lehr.pipeline.pairs import (
    Pair,
    agreement,
    held_out_pairs,
    pair_batches,
    pairs_of,
    preference_samples,
    read_pairs,
    reward_samples,
    score_gaps,
)
from lehr.pipeline.stages.preferences import PairSource, PreferStage, RewardModelStage
from lehr.train.remote import RemoteTrainer

PAIRS_READ = "pairs.data"
"""The event that says which file pairs came from."""
ACCURACY = "reward_model.accuracy"
"""The event that says how a reward model does on held-out pairs."""


async def run_prefer(ctx: Context, stage: PreferStage, start: Path) -> str | None:
    """Train from ``start``, which is also the reference. A stage that was interrupted begins again from there.

    Returns a sentence where there was nothing to learn from.
    """
    await ctx.trainer.load(start, optimizer=False)
    await ctx.trainer.reset(stage.train)
    pairs = await _pairs(ctx, stage, start)
    if not pairs:
        return f"{stage.name} changed nothing: {_no_pairs(stage)}"
    await ctx.allot(trainer=ctx.division.training)
    samples = [preference_samples(pair) for pair in pairs]
    flat = [sample for pair in samples for sample in pair]
    scored = [
        replace(sample, reference=over_tokens(sample, said))
        for sample, said in zip(flat, await score_all(ctx.trainer, flat), strict=True)
    ]
    await _train(ctx, stage, ctx.trainer, "preference", list(zip(scored[::2], scored[1::2], strict=True)))
    return None


async def run_reward_model(ctx: Context, stage: RewardModelStage, start: Path) -> str:
    """Train a scalar head on the model in ``start`` and leave it under the stage's name; the policy in the
    trainer stays what it was. Returns how it does on held-out pairs.
    """
    await ctx.trainer.load(start, optimizer=False)
    pairs = await _pairs(ctx, stage, start)
    kept, held_out = held_out_pairs(pairs, stage.heldout_share, ctx.recipe.seed)
    if not kept:
        raise ConfigError(
            f"stage {stage.name!r} has nothing to train a reward model on: {_no_pairs(stage)}",
            expected="at least one pair",
            hint="More samples, credit='value' or a file of pairs; a changed recipe needs another run folder.",
        )
    async with open_beside(ctx, stage.name, start, stage.train) as model:
        await _train(ctx, stage, model, "reward", [reward_samples(pair) for pair in kept])
        right = await accuracy(model, held_out or kept)
        await model.save(ctx.folder.checkpoint(stage.name), resumable=False)
    count = len(held_out or kept)
    low, high = wilson(round(right * count), count)
    which = "held-out" if held_out else "training"
    ctx.metrics.write(stage.name, 0, {f"{stage.name}/{which.replace('-', '')}_accuracy": right})
    ctx.ledger.event(ACCURACY, stage=stage.name, pairs=count, held_out=bool(held_out), accuracy=right)
    return (
        f"{stage.name} puts the preferred answer first in {right:.0%} of {count} {which} pairs "
        f"(95 % interval {low:.0%} to {high:.0%})"
    )


async def accuracy(model: RemoteTrainer, pairs: Sequence[Pair]) -> float:
    """Return the share of pairs whose preferred side has the higher score; a tie counts half."""
    said = await score_all(model, [sample for pair in pairs for sample in reward_samples(pair)])
    return agreement(score_gaps(said)) / max(1, len(pairs))


async def _pairs(ctx: Context, stage: PairSource, start: Path) -> list[Pair]:
    if stage.data:
        path = Path(stage.data)
        limit = context_tokens(start, stage.max_tokens)
        pairs = await asyncio.to_thread(read_pairs, path, ctx.renderer, max_tokens=limit)
        digest = hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
        ctx.ledger.event(PAIRS_READ, stage=stage.name, file=stage.data, digest=digest, pairs=len(pairs))
        ctx.observer.note(f"{stage.data}: {len(pairs)} pairs")
        return pairs
    await ctx.sync_weights()
    groups = await attempt(ctx, stage)
    pairs = pairs_of(groups, credit=stage.credit, per_task=stage.pairs_per_task)
    told = len({pair.prompt for pair in pairs})
    ctx.observer.note(f"{len(pairs)} pairs of attempts at {told} of {len(groups)} tasks")
    return pairs


def _no_pairs(stage: PairSource) -> str:
    if stage.data:
        return f"{stage.data} has too few pairs"
    how = "one attempt solved and another did not" if stage.credit == "passed" else "two rewards differ"
    return f"there is no task at which {how}, of {stage.tasks} with {stage.samples} attempts each"


async def _train(
    ctx: Context,
    stage: PairSource,
    model: RemoteTrainer,
    loss: LossName,
    pairs: Sequence[tuple[Sample, Sample]],
) -> None:
    total = -(-len(pairs) // stage.batch_size) * stage.epochs
    ctx.observer.stage(f"{stage.name} train", total, "steps")
    await model.reset(stage.train.within(total))
    step = 1
    for epoch in range(stage.epochs):
        for batch in pair_batches(
            pairs, loss, epoch=epoch, batch_size=stage.batch_size, seed=ctx.recipe.seed, step=step
        ):
            begun = time.monotonic()
            result = await model.step(batch)
            values = {f"{stage.name}/{k}": v for k, v in result.metrics.items()}
            seconds = time.monotonic() - begun
            ctx.metrics.write(stage.name, batch.step, {**values, "time/training_s": seconds})
            ctx.observer.advance(
                batch.step,
                total,
                loss=round(result.metrics["loss"], 3),
                right=f"{result.metrics['accuracy']:.0%}",
            )
            step = batch.step + 1
