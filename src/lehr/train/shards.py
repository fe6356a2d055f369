"""One of several ranks that train together: samples are divided, and of weights, gradients and moments of the
layers each rank holds a part (FSDP2, torch's ``fully_shard``; Zhao et al. 2023, arXiv 2304.11277).

Embedding, last norm and head are whole on every rank, and their gradients are summed. Every rank sees the whole
batch and lays it out alike, so that denominators are those of the batch and nobody has to be asked; a rank
whose share has fewer micro-batches goes along with one that counts nothing. Collectives run over gloo.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from lehr.core.batch import Batch, Manifest, Sample
from lehr.core.errors import ConfigError
from lehr.core.trace import Version
from lehr.model.checkpoint import load_config, load_decoder, read_tensors
from lehr.model.decoder import Decoder
from lehr.model.dtype import compute_dtype
from lehr.train.base import TrainConfig
from lehr.train.gradient import score
from lehr.train.optimizer import MasterAdamW
from lehr.train.packing import Microbatch, pack
from lehr.train.trainer import OPTIMIZER, LocalTrainer, Said

WHOLE = ("embed", "norm", "head")
"""Parts of a decoder that every rank holds."""


class ShardedTrainer(LocalTrainer):
    """A :class:`LocalTrainer` on one rank of torch's default process group. Every rank calls the same methods
    with the same arguments in the same order; files are written and manifests returned by rank 0.
    """

    def _renew(self) -> None:
        if self.config.lora is not None:
            raise ConfigError(
                "adapters of low rank are trained by one rank",
                expected="train.lora or several ranks, not both",
                hint="An adapter needs little memory: set ranks = 1.",
            )
        dtype = compute_dtype(self.config.dtype)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.adapters = None
        self.master = self._whole()
        self.master.requires_grad_()
        self.master.zero_grad(set_to_none=True)
        self.decoder = _sharded(self.master, dtype, mesh)
        self.optimizer = ShardedAdamW(
            dict(self.master.named_parameters()), dict(self.decoder.named_parameters()), self.config, mesh
        )
        self._grad_embed = self.optimizer.grads["embed.weight"]
        tied = self.master.config.tied_head
        self._grad_head = self._grad_embed if tied else self.optimizer.grads["head.weight"]

    def _whole(self) -> Decoder:
        """Return the master weights in one piece. Every rank takes part."""
        if not any(isinstance(p, DTensor) for p in self.master.parameters()):
            return self.master
        with torch.device("meta"):
            whole = Decoder(self.master.config)
        whole.to_empty(device="cpu")
        if whole.config.tied_head:
            whole.head.weight = whole.embed.weight
        into = dict(whole.named_parameters())
        with torch.no_grad():
            for name, parameter in self.master.named_parameters():
                full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
                into[name].copy_(full)
        return whole

    def _layout(self, samples: Sequence[Sample]) -> list[list[Microbatch]]:
        shares = divide(samples, dist.get_world_size())
        return [self._packed(samples, share) for share in shares]

    def _packed(self, samples: Sequence[Sample], share: Sequence[int]) -> list[Microbatch]:
        parts = pack([samples[i] for i in share], self.config.tokens_per_microbatch)
        numbers = torch.tensor(list(share)).numpy()
        return [dataclasses.replace(part, samples=numbers[part.samples]) for part in parts]

    def _accumulate(
        self, batch: Batch, layout: Sequence[Sequence[Microbatch]], tokens: int, samples: Sequence[Sample]
    ) -> tuple[float, Said]:
        found = [self._pass(batch, part, tokens, samples) for part in layout[dist.get_rank()]]
        for part in _along(layout):
            self._backward(part, lambda logprobs, _: logprobs * 0, False)
        cast(ShardedAdamW, self.optimizer).reduce()
        said = Said.join(found)
        whole = Said(_gathered(layout, said.logprobs_N), _gathered(layout, said.entropy_N))
        return float(_summed(sum(result.loss for result in found))), whole

    async def score(self, samples: Sequence[Sample]) -> list[NDArray[np.float32]]:
        """See :meth:`lehr.train.base.Trainer.score`."""
        layout = self._layout(samples)
        said = [score(self.decoder, part) for part in layout[dist.get_rank()]]
        for part in _along(layout):
            score(self.decoder, part)
        values = _gathered(layout, torch.cat([torch.empty(0), *said])).numpy()
        which = np.concatenate([np.empty(0, np.int64), *(part.samples for share in layout for part in share)])
        return [values[which == index] for index in range(len(samples))]

    async def publish(self, version: Version) -> Manifest:
        """See :meth:`lehr.train.base.Trainer.publish`. Only rank 0's manifest names a file."""
        whole = self._whole().to(compute_dtype(self.config.dtype))
        if dist.get_rank():
            return Manifest(version, "", "", 0)
        return self._published(version, whole)

    async def save(self, path: Path, *, resumable: bool = True) -> None:
        """See :meth:`lehr.train.base.Trainer.save`."""
        self.snapshot(path, resumable=resumable)()

    def snapshot(self, path: Path, *, resumable: bool = True) -> Callable[[], None]:
        """See :meth:`LocalTrainer.snapshot`."""
        whole = self._whole()
        state = self.optimizer.state() if resumable else {}
        if dist.get_rank():
            return lambda: None
        state = {name: tensor.clone() for name, tensor in state.items()}
        return lambda: self._write(whole, state, None, path)

    async def load(self, path: Path, *, optimizer: bool = True) -> None:
        """See :meth:`lehr.train.base.Trainer.load`. Every rank reads the folder."""
        if load_config(path) != self.master.config:
            raise ConfigError(f"{path} holds a model of another shape", hint="Open it as a model of its own.")
        state = read_tensors(path / OPTIMIZER) if optimizer else None
        self.master = load_decoder(path)
        self._renew()
        if state is not None:
            self.optimizer.restore(state)


class ShardedAdamW(MasterAdamW):
    """A :class:`MasterAdamW` over this rank's part of the layers' weights, and over the rest in whole."""

    def __init__(
        self,
        masters: Mapping[str, nn.Parameter],
        compute: Mapping[str, nn.Parameter],
        config: TrainConfig,
        mesh: DeviceMesh,
    ) -> None:
        self.mesh = mesh
        self.sharded = {name: p for name, p in masters.items() if isinstance(p, DTensor)}
        with torch.no_grad():
            local = {name: nn.Parameter(p.to_local().detach()) for name, p in self.sharded.items()}
        super().__init__({**masters, **local}, {**compute, **local}, config)

    @torch.no_grad()
    def collect(self) -> None:
        """See :meth:`MasterAdamW.collect`."""
        super().collect()
        for name, parameter in self.sharded.items():
            if parameter.grad is not None:
                self.grads[name].add_(cast(DTensor, parameter.grad).to_local())
                parameter.grad = None

    def reduce(self) -> None:
        """Sum over the ranks what each has of the gradients of whole weights."""
        for name, grad in self.grads.items():
            if name not in self.sharded:
                dist.all_reduce(grad)

    def norm(self) -> float:
        """See :meth:`MasterAdamW.norm`: of the gradient of all ranks."""
        squares = {name: float(grad.double().square().sum()) for name, grad in self.grads.items()}
        parts = _summed(sum(squares[name] for name in self.sharded))
        return math.sqrt(float(parts) + sum(squares[name] for name in squares if name not in self.sharded))

    def state(self) -> dict[str, Tensor]:
        """See :meth:`MasterAdamW.state`: in one piece. Every rank takes part."""
        return {name: self._gathered(name, tensor) for name, tensor in super().state().items()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """See :meth:`MasterAdamW.restore`: each rank takes its part."""
        super().restore({name: self._part(name, tensor) for name, tensor in tensors.items()})

    def _missing(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return sorted({name for name in super().state()} - set(tensors))

    def _gathered(self, name: str, tensor: Tensor) -> Tensor:
        whole = self.sharded.get(name.partition(".")[2])
        if whole is None:
            return tensor
        shape, stride = whole.shape, whole.stride()
        spread = DTensor.from_local(tensor, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        return spread.full_tensor()

    def _part(self, name: str, tensor: Tensor) -> Tensor:
        if name.partition(".")[2] not in self.sharded:
            return tensor
        parts, rank = tensor.chunk(dist.get_world_size()), dist.get_rank()
        return parts[rank] if rank < len(parts) else tensor[:0]


def divide(samples: Sequence[Sample], ranks: int) -> list[list[int]]:
    """Return the indices of each rank's samples: about equally many tokens, samples of one prefix key together
    where there are enough keys, those of one pair always. The same on every rank.
    """
    prefixes = {s.prefix or s.pair or f"\0{i}" for i, s in enumerate(samples)}
    together: dict[str, list[int]] = {}
    for index, sample in enumerate(samples):
        key = sample.prefix or sample.pair if len(prefixes) >= ranks else sample.pair
        together.setdefault(key or f"\0{index}", []).append(index)
    sizes = {key: sum(len(samples[i].tokens) for i in indices) for key, indices in together.items()}
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for key in sorted(together, key=lambda key: -sizes[key]):
        rank = loads.index(min(loads))
        shares[rank] += together[key]
        loads[rank] += sizes[key]
    return [sorted(share) for share in shares]


def _sharded(master: Decoder, dtype: torch.dtype, mesh: DeviceMesh) -> Decoder:
    """Divide the layers of ``master`` over the ranks; return a decoder that computes in ``dtype`` with them."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in master.blocks():
        sharded: FSDPModule = fully_shard(layer, mesh=mesh, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no other
    if dtype == torch.float32:
        return master
    compute = copy.copy(master)
    compute._modules = dict(master._modules)
    for name in WHOLE:
        setattr(compute, name, copy.deepcopy(getattr(master, name)).to(dtype))
    if master.config.tied_head:
        compute.head.weight = compute.embed.weight
    return compute


def _along(layout: Sequence[Sequence[Microbatch]]) -> list[Microbatch]:
    """Return what this rank computes beside its share, so that all take part in as many collectives."""
    passes, mine = max(len(share) for share in layout), len(layout[dist.get_rank()])
    every = [part for share in layout for part in share]
    return [min(every, key=lambda part: len(part.tokens))] * (passes - mine) if every else []


def _gathered(layout: Sequence[Sequence[Microbatch]], own_N: Tensor) -> Tensor:
    """Return the values of all ranks' loss tokens, in the layout's order, given those of this one's."""
    before = sum(len(part.rows) for share in layout[: dist.get_rank()] for part in share)
    whole = torch.zeros(sum(len(part.rows) for share in layout for part in share))
    whole[before : before + len(own_N)] = own_N
    dist.all_reduce(whole)
    return whole


def _summed(value: float) -> Tensor:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total
