"""What group-relative reinforcement learning does with a batch: score it, credit it, train on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lehr.core.batch import Batch, Sample
from lehr.pipeline.beside import Scoring, over_tokens, score_all
from lehr.pipeline.recipe import RlStage
from lehr.pipeline.samples import Crediting, DomainScales, cut, to_samples
from lehr.pipeline.splitting import split_samples
from lehr.rollout.base import Group
from lehr.train.base import Trainer


class Learner:
    """What it remembers between batches is in :meth:`state`, which belongs into checkpoints.

    scales: the spread of rewards per domain.
    reference: says how likely the stage's first weights find a sample's tokens; None without a reference.
    """

    def __init__(self, trainer: Trainer, stage: RlStage) -> None:
        self.stage = stage
        self.rule = Crediting(stage.credit, stage.negative_weight, stage.group, stage.reward_kl)
        self.reference: Scoring | None = None
        self._trainer = trainer
        self.scales = DomainScales({})

    async def apply(
        self, step: int, groups: Sequence[Group], replayed: Sequence[Sample] = ()
    ) -> dict[str, float]:
        """Train on a batch and on what it replays, in as many passes as the stage says. Returns the metrics of
        the first.
        """
        stage = self.stage
        samples = cut(groups)
        if self.reference is not None:
            samples = await _scored(samples, self.reference, "reference")
            replayed = await _scored(replayed, self.reference, "reference")
        fresh = to_samples(groups, self.scales, self.rule, samples)
        samples = split_samples((*fresh, *replayed), stage.max_sample_tokens)
        if stage.passes > 1 and stage.train.policy_loss == "decoupled_ppo":
            samples = await _scored(samples, self._trainer, "proximal")
        batch = Batch(step, "policy_gradient", samples)
        first = await self._trainer.step(batch)
        for _ in range(stage.passes - 1):
            await self._trainer.step(batch)
        return dict(first.metrics)

    def state(self) -> dict[str, Any]:
        """Return JSON-serialisable state."""
        return {"scales": self.scales.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over :meth:`state`."""
        self.scales = DomainScales.restore(state.get("scales", {}))


async def _scored(samples: Sequence[Sample], model: Scoring, field: str) -> tuple[Sample, ...]:
    """Return the samples with what ``model`` says of their own tokens as ``field``."""
    said = await score_all(model, samples)
    return tuple(replace(s, **{field: over_tokens(s, own)}) for s, own in zip(samples, said, strict=True))
