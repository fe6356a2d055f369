"""PPO: reinforcement learning with a critic that says what each token was expected to bring.

The critic is a decoder of its own under a scalar head, in a process of its own. A step scores the batch with
it as it is, turns rewards into advantages and returns (:mod:`lehr.train.gae`), and then takes the policy's
steps and the critic's side by side. Everything that a step does follows from the stored groups, the weights
and both optimisers, so that a replay does the same again; the critic is saved beside the policy in the same
checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lehr.core.batch import Batch, Sample, StepResult
from lehr.core.reward import Valid
from lehr.ledger.rows import ReplayRow
from lehr.model.weights import weight_files
from lehr.pipeline.beside import open_beside, over_tokens, score_all
from lehr.pipeline.context import Context
from lehr.pipeline.rewarding import reward_folder
from lehr.pipeline.splitting import split_samples
from lehr.pipeline.stages.preferences import CriticConfig
from lehr.pipeline.stages.rl import RlRun
from lehr.rollout.base import DropReason, Group, Judged
from lehr.train.gae import gae, token_rewards, whitened
from lehr.train.remote import RemoteTrainer

if TYPE_CHECKING:
    from lehr.pipeline.recipe import RlStage

CRITIC = "critic"
"""The folder of the critic inside a checkpoint of the policy."""


@asynccontextmanager
async def open_critic(ctx: Context, stage: RlStage, start: Path) -> AsyncGenerator[tuple[RemoteTrainer, Path]]:
    """Start the critic of a stage that begins with the policy in ``start``; yield it with the folder of its
    first weights.
    """
    settings = stage.critic
    scored = stage.reward_model if settings.start == "reward_model" else None
    begins = start if scored is None else reward_folder(ctx, scored)
    async with open_beside(ctx, CRITIC, begins, settings.train) as critic:
        yield critic, begins


def open_reference(ctx: Context, stage: RlStage, start: Path) -> AbstractAsyncContextManager[RemoteTrainer]:
    """Start a frozen copy of the stage's first weights, which says how likely it finds what the policy says."""
    held = sum(file.stat().st_size for file in weight_files(start)) / 2**20
    ctx.observer.note(f"{stage.name}: its first weights are kept as the reference ({held:.0f} MiB on disk)")
    return open_beside(ctx, "reference", start, scalar=False, dtype=stage.train.dtype)


class PpoRun(RlRun):
    """One start of a stage with a critic, which comes with the folder of its first weights. reference: the
    stage's first weights, where divergence costs.
    """

    policy_alone = False

    def __init__(
        self,
        ctx: Context,
        stage: RlStage,
        critic: tuple[RemoteTrainer, Path],
        reference: RemoteTrainer | None = None,
    ) -> None:
        super().__init__(ctx, stage)
        self._critic, self._critic_start = critic
        self._reference = reference

    def teaches(self, group: Group) -> DropReason | None:
        """Any attempt that was judged teaches, also where all of a group got the same reward."""
        return None if any(attempts_of([group])) else "no_survivors"

    async def run(self, start: Path) -> str:
        """See :func:`lehr.pipeline.stages.rl.run_rl`; the critic's last weights are kept under its own name."""
        closing = await super().run(start)
        last = self.ctx.folder.checkpoint(f"{self.stage.name}-{CRITIC}")
        await self._critic.save(last, resumable=False)
        return closing

    async def save_more(self, path: Path) -> None:
        """Save the critic into a checkpoint of the policy."""
        await self._critic.save(path / CRITIC, resumable=True)

    async def load_more(self, path: Path | None) -> None:
        """Go on with the critic of a checkpoint, or begin with a fresh one."""
        settings = self.stage.critic
        await self._critic.reset(settings.train.within(self.stage.steps * settings.passes))
        if path is None:
            await self._critic.load(self._critic_start, optimizer=False)
        else:
            await self._critic.load(path / CRITIC, optimizer=True)

    async def apply(
        self, step: int, groups: Sequence[Group], replays: Sequence[ReplayRow] = ()
    ) -> dict[str, float]:
        """Take the steps of policy and critic on one batch. Nothing is replayed."""
        del replays
        settings, stage = self.stage.critic, self.stage
        attempts = list(attempts_of(groups))
        flat = [sample for _, samples in attempts for sample in samples]
        values = await score_all(self._critic, flat)
        reference = await score_all(self._reference, flat) if self._reference is not None else None
        whole, costs = credited(attempts, values, reference, settings)
        samples = split_samples(whole, stage.max_sample_tokens)

        async def steps(model: RemoteTrainer, batch: Batch, passes: int) -> StepResult:
            first = await model.step(batch)
            for _ in range(passes - 1):
                await model.step(batch)
            return first

        async with asyncio.TaskGroup() as tasks:
            policy = tasks.create_task(
                steps(self.ctx.trainer, Batch(step, "policy_gradient", samples), stage.passes)
            )
            critic = tasks.create_task(steps(self._critic, Batch(step, "value", samples), settings.passes))
        told = {f"critic/{name}": value for name, value in critic.result().metrics.items()}
        more = {"kl_reference": costs} if reference is not None else {}
        return {**policy.result().metrics, **told, **more}


def attempts_of(groups: Iterable[Group]) -> Iterable[tuple[float, tuple[Sample, ...]]]:
    """Yield the reward of each judged attempt with its segments in order."""
    for group in groups:
        for member in group.valid:
            samples = tuple(_samples(group, member))
            if samples and isinstance(member.reward, Valid):
                yield member.reward.value, samples


def _samples(group: Group, member: Judged) -> Iterable[Sample]:
    for segment in member.trace.segments:
        if segment.own.any():
            yield Sample(
                tokens=segment.tokens,
                own=segment.own,
                logprobs=segment.raw_logprobs,
                advantages=np.zeros(len(segment.tokens), np.float32),
                temperature=segment.sampling.temperature,
                prefix=group.id,
                trace_id=member.trace.id,
                domain=group.domain,
            )


def credited(
    attempts: Sequence[tuple[float, tuple[Sample, ...]]],
    values: Sequence[NDArray[np.float32]],
    reference: Sequence[NDArray[np.float32]] | None,
    settings: CriticConfig,
) -> tuple[tuple[Sample, ...], float]:
    """Return the samples with advantages, values and returns, and the mean divergence from the reference in
    nats a token. ``values``, ``reference``: of each sample's own tokens, in order.

    The own tokens of an attempt's segments, one after the other, are one sequence; what an environment says in
    between passes no time.
    """
    advantages: list[NDArray[np.float64]] = []
    returns: list[NDArray[np.float64]] = []
    divergence: list[NDArray[np.float32]] = []
    place = 0
    for reward, samples in attempts:
        cut = slice(place, place + len(samples))
        place = cut.stop
        logprobs = np.concatenate([s.logprobs[s.own] for s in samples])
        known = None if reference is None else np.concatenate(list(reference[cut]))
        if known is not None:
            divergence.append(logprobs - known)
        rewards = token_rewards(reward, logprobs, known, settings.kl)
        said = np.concatenate(list(values[cut]))
        ahead, target = gae(rewards, said, gamma=settings.gamma, lam=settings.lam)
        advantages.append(ahead)
        returns.append(target)
    if settings.whiten:
        advantages = whitened(advantages)
    flat = [sample for _, samples in attempts for sample in samples]
    ends = np.cumsum([int(sample.own.sum()) for sample in flat])[:-1]
    split = [np.split(np.concatenate(parts), ends) if flat else [] for parts in (advantages, returns)]
    made = [
        replace(
            sample,
            advantages=over_tokens(sample, ahead),
            values=over_tokens(sample, said),
            returns=over_tokens(sample, target),
        )
        for sample, said, ahead, target in zip(flat, values, *split, strict=True)
    ]
    return tuple(made), float(np.concatenate(divergence).mean()) if divergence else 0.0
