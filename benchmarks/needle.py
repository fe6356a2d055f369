"""A small model that recalls, trained on the spot: told which value follows which key, it answers a key that comes
up again with its value (an induction head: Olsson et al. 2022, arXiv 2209.11895).

It is trained on short contexts, in which positions jump so that distances of long contexts occur.
"""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor
from torch.nn import functional

from lehr.model.config import ModelConfig
from lehr.model.decoder import Decoder
from lehr.model.scaling import Rope
from lehr.model.tiny import random_decoder

FILLER, KEYS, VALUES = 16, 64, 64
LONGEST = 1 << 15
PAIRS, BATCH = 8, 16
LOOKING, STRENGTH = 8, 11.0
"""Pairs of channels of a head that looks one position back, and their size."""


def sample(draw: random.Random, length: int, pairs: int) -> tuple[list[int], list[int]]:
    """Return filler with ``pairs`` of key and value strewn in it and every key asked for at the end in another
    order, each with its answer; and the places of the keys that are asked for.
    """
    keys = draw.sample(range(FILLER, FILLER + KEYS), pairs)
    told = {key: FILLER + KEYS + draw.randrange(VALUES) for key in keys}
    body = length - 4 * pairs
    places = sorted(draw.sample(range(body + 1), pairs))
    tokens: list[int] = []
    for n, key in enumerate(keys):
        filled = places[n] - (places[n - 1] if n else 0)
        tokens += [*(draw.randrange(FILLER) for _ in range(filled)), key, told[key]]
    tokens += [draw.randrange(FILLER) for _ in range(body - places[-1])]
    asked: list[int] = []
    for key in draw.sample(keys, pairs):
        asked.append(len(tokens))
        tokens += [key, told[key]]
    return tokens, asked


def train(seconds: float, seed: int = 0) -> tuple[Decoder, float]:
    """Train for at most ``seconds``; return the model and its share of right answers on its last batches."""
    config = ModelConfig(
        family="qwen2", qkv_bias=True, vocab_size=FILLER + KEYS + VALUES, hidden_size=128, intermediate_size=256, num_layers=2, num_heads=4,
        num_kv_heads=2, head_size=32, max_positions=LONGEST, rope=Rope(theta=1e6), tied_head=False,
    )  # fmt: skip
    decoder = random_decoder(config, seed=seed, std=0.05)
    _look_back(decoder)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    draw = random.Random(seed)
    begun, right, step = time.monotonic(), 0.0, 0
    while time.monotonic() - begun < seconds and right < 0.999:
        length = draw.choice((48, 64, 96, 128, 256))
        told = [sample(draw, length, PAIRS) for _ in range(BATCH)]
        tokens_BT = torch.tensor([tokens for tokens, _ in told])
        asked_N = torch.tensor([b * length + at for b, (_, asked) in enumerate(told) for at in asked])
        positions = torch.cat([_jumping(draw, length) for _ in told])
        hidden_TD = decoder.hidden(tokens_BT.flatten(), positions, _Causal(BATCH))
        logits_NV = decoder.logits(hidden_TD[asked_N])
        answers_N = tokens_BT.flatten()[asked_N + 1]
        loss = functional.cross_entropy(logits_NV, answers_N)
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 50)
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        now = float((logits_NV.argmax(-1) == answers_N).float().mean())
        if step%100==0: print(step,loss.item(),right,time.monotonic()-begun,flush=True)
        right = 0.98 * right + 0.02 * now
    return decoder, right


@torch.no_grad()
def _look_back(decoder: Decoder) -> None:
    """Begin with first-layer heads that look one position back, by what their biases say: without, the training
    spends most of its time on finding them.
    """
    config, bias = decoder.config, next(decoder.blocks()).qkv.bias
    half, turned = config.head_size // 2, decoder.rotary.angles(torch.ones(1), torch.float32)
    cos, sin = (angle[0, 0, :LOOKING] for angle in turned)
    for head in range(config.num_heads):
        bias[head * config.head_size :][:LOOKING] = STRENGTH * cos
        bias[head * config.head_size + half :][:LOOKING] = -STRENGTH * sin
    for head in range(config.num_kv_heads):
        bias[config.q_size + head * config.head_size :][:LOOKING] = STRENGTH


def _jumping(draw: random.Random, length: int) -> Tensor:
    """Return positions that rise by one, but for a few places where they jump ahead."""
    steps = torch.ones(length, dtype=torch.int64)
    for _ in range(draw.randrange(4)):
        steps[draw.randrange(length)] = draw.randrange(1, LONGEST // 8)
    return steps.cumsum(0)


class _Causal:
    """Attention of equally long sequences, packed one after the other."""

    def __init__(self, batch: int) -> None:
        self._batch = batch

    def __call__(self, layer: int, query_THE: Tensor, key_TKE: Tensor, value_TKE: Tensor) -> Tensor:
        """See :class:`lehr.model.base.Attend`."""
        parts = (x.unflatten(0, (self._batch, -1)).transpose(1, 2) for x in (query_THE, key_TKE, value_TKE))
        mixed = functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(0, 1)
