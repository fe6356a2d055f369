"""The trainer of one process: owns the master weights and the optimiser."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lehr.core.batch import Batch, Manifest, Sample, StepResult
from lehr.core.errors import ConfigError, Diverged
from lehr.core.protocols import NullRecorder, Recorder
from lehr.core.trace import Version
from lehr.model.checkpoint import (
    Savable,
    load_config,
    load_decoder,
    load_scalar,
    load_tensors,
    read_tensors,
    save_model,
)
from lehr.model.decoder import Decoder
from lehr.model.dtype import compute_dtype
from lehr.train.base import TrainConfig
from lehr.train.gradient import accumulate
from lehr.train.head import HeadResult, TokenLoss
from lehr.train.health import policy_health
from lehr.train.lora import Adapters
from lehr.train.losses import PolicyObjective, PolicyTerms, PolicyTokens, cross_entropy, policy_loss
from lehr.train.optimizer import MasterAdamW
from lehr.train.packing import Microbatch, pack
from lehr.train.pairs import SCALAR, critic_health, critic_loss, pair_health, pair_loss, require_pairs
from lehr.train.publish import Publisher, write_safetensors
from lehr.train.scorer import require_finite, score_samples

OPTIMIZER, ADAPTER = "optimizer.safetensors", "adapter"


@dataclass(frozen=True, slots=True)
class Said:
    """What the model said of a batch's loss tokens, one micro-batch after the other: float32 log-probabilities
    (or scores) and entropies, which are empty under a scalar head.
    """

    logprobs_N: torch.Tensor
    entropy_N: torch.Tensor

    @classmethod
    def join(cls, results: Sequence[HeadResult]) -> Said:
        """Return those of micro-batches in order."""
        nothing = torch.empty(0)
        return cls(
            torch.cat([nothing, *(r.logprobs_N for r in results)]),
            torch.cat([nothing, *(r.entropy_N for r in results if r.entropy_N is not None)]),
        )

    def of(self, micro: Sequence[Microbatch]) -> list[torch.Tensor]:
        """Return the log-probabilities of each micro-batch."""
        return list(self.logprobs_N.split([len(part.rows) for part in micro]))


class LocalTrainer:
    """Implements :class:`lehr.train.base.Trainer` in the calling thread.

    Its methods are coroutines by contract, but they compute: run it in a process of its own (``train.role``).
    Equal inputs give bit-identical weights at the same number of threads, also across :meth:`save` and
    :meth:`load`.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: TrainConfig | None = None,
        *,
        publish_to: Path | None = None,
        tokenizer: Savable | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.config = config or TrainConfig()
        self.master = decoder
        self.tokenizer = tokenizer
        self.recorder = recorder or NullRecorder()
        self._publisher = Publisher(publish_to) if publish_to else None
        self._renew()

    @classmethod
    def open(
        cls,
        folder: Path,
        config: TrainConfig | None = None,
        *,
        publish_to: Path | None = None,
        tokenizer: Savable | None = None,
        scalar: bool = False,
    ) -> LocalTrainer:
        """Load the model in ``folder``; with ``scalar``, under a scalar head."""
        decoder = load_scalar(folder) if scalar else load_decoder(folder)
        return cls(decoder, config, publish_to=publish_to, tokenizer=tokenizer)

    def _renew(self) -> None:
        dtype, lora = compute_dtype(self.config.dtype), self.config.lora
        if lora is not None and self.master.config.scalar:
            raise ConfigError(
                "train.lora for a model under a scalar head",
                expected="all weights of a critic or a reward model trained",
                hint="Leave lora out: its new head has to be trained, which an adapter does not hold.",
            )
        self.master.requires_grad_()
        self.master.zero_grad(set_to_none=True)
        self.decoder = self.master
        if dtype != torch.float32 or lora is not None:
            self.decoder = copy.deepcopy(self.master).to(dtype)
        self.adapters = Adapters(self.master, self.decoder, lora) if lora else None
        if self.adapters is not None:
            self.optimizer = MasterAdamW(self.adapters.weights, self.adapters.weights, self.config)
        else:
            self.optimizer = MasterAdamW(
                dict(self.master.named_parameters()), dict(self.decoder.named_parameters()), self.config
            )
        self._grad_embed = self.optimizer.grads.get("embed.weight")
        tied = self.master.config.tied_head
        self._grad_head = self._grad_embed if tied else self.optimizer.grads.get("head.weight")

    async def step(self, batch: Batch) -> StepResult:
        """See :meth:`lehr.train.base.Trainer.step`."""
        begun = time.perf_counter()
        samples = trainable(batch, self.config)
        self._require_fitting(batch, samples)
        layout = self._layout(samples)
        micro = [part for share in layout for part in share]
        count = sum(len(m.rows) for m in micro)
        metrics = {
            "loss_tokens": float(count),
            "packed_tokens": float(sum(len(m.tokens) for m in micro)),
            "samples": float(len(samples)),
            "samples_without_signal": float(len(batch.samples) - len(samples)),
        }
        if count == 0:
            return StepResult(batch.step, metrics | {"loss": 0.0, "grad_norm": 0.0, "seconds": 0.0})
        self.optimizer.clear()
        loss, said = self._accumulate(batch, layout, count, samples)
        norm = self.optimizer.norm()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise Diverged(
                f"step {batch.step}: loss {loss}, gradient norm {norm}",
                expected="finite values",
                hint="The weights are unchanged; lower learning_rate or go back to an earlier checkpoint.",
            )
        metrics["learning_rate"] = self.optimizer.learning_rate
        self.optimizer.step(norm)
        if self.adapters is not None:
            self.adapters.merge()
        metrics |= {"loss": loss, "grad_norm": norm} | self._health(batch, micro, said, samples)
        metrics["seconds"] = time.perf_counter() - begun
        self.recorder.record("train.step", step=batch.step, **metrics)
        return StepResult(batch.step, metrics)

    def _require_fitting(self, batch: Batch, samples: Sequence[Sample]) -> None:
        scalar = self.master.config.scalar
        if (batch.loss in SCALAR) != scalar:
            raise ConfigError(
                f"the loss {batch.loss!r} on a model with a {'scalar' if scalar else 'vocabulary'} head",
                expected="reward or value for a scalar head, any other loss for a vocabulary head",
            )
        if batch.loss in ("preference", "reward"):
            require_pairs(samples)

    def _layout(self, samples: Sequence[Sample]) -> list[list[Microbatch]]:
        """Return the micro-batches of every rank."""
        return [pack(samples, self.config.tokens_per_microbatch)]

    def _accumulate(
        self, batch: Batch, layout: Sequence[Sequence[Microbatch]], tokens: int, samples: Sequence[Sample]
    ) -> tuple[float, Said]:
        """Gather the gradient of the batch; return its loss and what was said of its loss tokens."""
        found = [self._pass(batch, part, tokens, samples) for part in layout[0]]
        return sum(result.loss for result in found), Said.join(found)

    def _pass(self, batch: Batch, part: Microbatch, tokens: int, samples: Sequence[Sample]) -> HeadResult:
        weights = token_weights(part, tokens, len(samples), self.config)
        return self._backward(part, *self._loss(batch, part, weights, samples))

    def _backward(self, part: Microbatch, token_loss: TokenLoss, coupled: bool) -> HeadResult:
        found = accumulate(
            self.decoder, part, token_loss, self._grad_embed, self._grad_head,
            coupled=coupled, recompute=self.config.recompute_activations,
        )  # fmt: skip
        self.optimizer.collect()
        return found

    def _loss(
        self, batch: Batch, part: Microbatch, weights_N: torch.Tensor, samples: Sequence[Sample]
    ) -> tuple[TokenLoss, bool]:
        """Return the loss of a micro-batch's tokens, and whether it couples them."""
        if batch.loss == "sft":
            return lambda logprobs, cut: cross_entropy(logprobs) * weights_N[cut], False
        if batch.loss == "value":
            return critic_loss(part, weights_N, self.config.value_clip), False
        if batch.loss in ("preference", "reward"):
            return pair_loss(part, samples, batch.loss, self.config), True
        objective, tokens = self._objective(), policy_tokens([part])
        return lambda logprobs, cut: objective(logprobs, tokens[cut]) * weights_N[cut], objective.coupled

    def _objective(self) -> PolicyObjective:
        config = self.config
        terms = PolicyTerms(**{f.name: getattr(config, f.name) for f in fields(PolicyTerms)})
        chosen = policy_loss(config.policy_loss)
        return PolicyObjective(chosen, terms, config.geometric_mask, config.off_policy_delta, config.loss_kl)

    def _health(
        self, batch: Batch, micro: Sequence[Microbatch], said: Said, samples: Sequence[Sample]
    ) -> dict[str, float]:
        if batch.loss == "sft":
            return {}
        if batch.loss == "value":
            return critic_health(micro, said.of(micro))
        if batch.loss in ("preference", "reward"):
            return pair_health(micro, said.of(micro), samples, batch.loss, self.config)
        return policy_health(
            said.logprobs_N,
            said.entropy_N,
            policy_tokens(micro),
            self._objective(),
            [sample.domain for sample in samples],
        )

    async def score(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """See :meth:`lehr.train.base.Trainer.score`."""
        return score_samples(self.decoder, samples, self.config.tokens_per_microbatch)

    async def evaluate(self, batch: Batch) -> StepResult:
        """See :meth:`lehr.train.base.Trainer.evaluate`."""
        scores = await self.score(batch.samples)
        count = sum(len(values) for values in scores)
        total = sum(float(values.sum(dtype=np.float64)) for values in scores)
        return StepResult(batch.step, {"loss": -total / max(1, count), "loss_tokens": float(count)})

    async def publish(self, version: Version) -> Manifest:
        """See :meth:`lehr.train.base.Trainer.publish`. Weights are in the compute dtype."""
        return self._published(version, self.decoder)

    def _published(self, version: Version, decoder: Decoder) -> Manifest:
        if self._publisher is None:
            raise ConfigError("this trainer has no folder to publish to", hint="Give it publish_to.")
        require_finite(decoder)
        return self._publisher.publish(version, decoder.to_hf())

    async def save(self, path: Path, *, resumable: bool = True) -> None:
        """See :meth:`lehr.train.base.Trainer.save`. Weights are in float32, an adapter is merged into them and
        also by itself in the folder ``adapter``.
        """
        self._write(self.master, self._state() if resumable else {}, self.adapters, path)

    def snapshot(self, path: Path, *, resumable: bool = True) -> Callable[[], None]:
        """Copy what :meth:`save` writes and return what writes the copy, in any thread, while steps go on. The
        copy takes 12 bytes of memory per weight until it is written, 4 without ``resumable``.
        """
        state = {name: tensor.clone() for name, tensor in self._state().items()} if resumable else {}
        master, adapters = copy.deepcopy(self.master), self.adapters and self.adapters.frozen()
        return lambda: self._write(master, state, adapters, path)

    def _write(
        self, master: Decoder, state: Mapping[str, torch.Tensor], adapters: Adapters | None, path: Path
    ) -> None:
        def extra(folder: Path) -> None:
            if state:
                write_safetensors(folder / OPTIMIZER, state)
            if adapters is not None:
                adapters.write(folder / ADAPTER)

        save_model(master, path, self.tokenizer, extra)

    def _state(self) -> dict[str, torch.Tensor]:
        return self.optimizer.state() | (self.adapters.state() if self.adapters is not None else {})

    async def load(self, path: Path, *, optimizer: bool = True) -> None:
        """See :meth:`lehr.train.base.Trainer.load`."""
        config = load_config(path)
        widened = self.master.config.scalar and config.with_scalar_head() == self.master.config
        if config != self.master.config and not widened:
            raise ConfigError(f"{path} holds a model of another shape", hint="Open it as a model of its own.")
        state = read_tensors(path / OPTIMIZER) if optimizer else None
        self.master.load_hf(load_scalar(path).to_hf() if widened else load_tensors(path))
        self._renew()
        if state is not None:
            if self.adapters is not None:
                self.adapters.restore(state)
            self.optimizer.restore(state)

    async def reset(self, config: TrainConfig) -> None:
        """See :meth:`lehr.train.base.Trainer.reset`."""
        self.config = config
        self._renew()

    async def allot(self, threads: int, cores: Sequence[int] = ()) -> None:
        """Use these threads, on these cores where any are named, from the next step on."""
        torch.set_num_threads(threads)
        if cores:
            for task in os.listdir("/proc/self/task"):
                with contextlib.suppress(ProcessLookupError):  # a thread that has just ended
                    os.sched_setaffinity(int(task), cores)

    async def close(self) -> None:
        """Remove published weights; nothing reads them any more."""
        if self._publisher is not None:
            self._publisher.clear()


def policy_tokens(micro: Sequence[Microbatch]) -> PolicyTokens:
    """Return what policy losses are told of the loss tokens of some micro-batches, one after the other."""

    def join(arrays: Sequence[NDArray[np.generic] | None]) -> torch.Tensor | None:
        there = [array for array in arrays if array is not None]
        return torch.from_numpy(np.concatenate(there)) if there else None

    return PolicyTokens(
        torch.from_numpy(np.concatenate([m.sampled for m in micro])),
        torch.from_numpy(np.concatenate([m.advantages for m in micro])),
        torch.from_numpy(np.concatenate([m.samples for m in micro])),
        join([m.reference for m in micro]),
        join([m.proximal for m in micro]),
    )


def token_weights(part: Microbatch, tokens: int, samples: int, config: TrainConfig) -> torch.Tensor:
    """Return what the loss of each loss token is multiplied by, float32 ``[N]``, so that the sum over the whole
    batch of ``tokens`` loss tokens and ``samples`` samples is the mean that is asked for.
    """
    if config.mean_over == "token":
        return torch.full((len(part.rows),), 1 / tokens)
    _, row_N, lengths = np.unique(part.samples, return_inverse=True, return_counts=True)
    return torch.from_numpy((1 / (samples * lengths[row_N])).astype(np.float32))


def trainable(batch: Batch, config: TrainConfig) -> list[Sample]:
    """Return the samples that carry a signal.

    Samples without own tokens are left out, and for policy gradient every group (samples of one prefix key)
    whose advantages are all zero: it contributes no gradient at all, the penalty on the log ratio included,
    and its tokens do not count in the denominator.
    """
    samples = [s for s in batch.samples if s.own.any()]
    if batch.loss != "policy_gradient" or config.train_without_variance:
        return samples
    alive = {s.prefix or str(i) for i, s in enumerate(samples) if np.any(s.advantages[s.own] != 0)}
    return [s for i, s in enumerate(samples) if (s.prefix or str(i)) in alive]
