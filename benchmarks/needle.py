"""A small model that recalls, trained on the spot: told which value follows which key, it answers a key that
comes up again with its value (an induction head: Olsson et al. 2022, arXiv 2209.11895).

It begins with a rough circuit and is trained on short contexts, in which positions jump so that distances of
long contexts occur.
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

FILLER, KEYS, VALUES = 8, 64, 64
LONGEST = 1 << 15
PAIRS, BATCH = 8, 16
LEAST_STEPS, LENGTHS = 50, (64, 96, 128, 192, 256)
"""Steps at least, and tokens of the contexts that are trained on."""
LOOKING, STRENGTH = 8, 11.0
"""Pairs of channels of a head that looks one position back, and their size."""
SIZE, MATCH, STEADY = 0.5, 2.0, 12
"""Of embeddings, of the projections that match keys, and the first pair of channels that hardly turns."""


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
        family="qwen2",
        qkv_bias=True,
        vocab_size=FILLER + KEYS + VALUES,
        hidden_size=256,
        intermediate_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_size=64,
        max_positions=LONGEST,
        rope=Rope(theta=1e12),
        tied_head=True,
    )
    decoder = random_decoder(config, seed=seed, std=0.02)
    torch.manual_seed(seed)
    _circuit(decoder)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=5e-4, betas=(0.9, 0.98), weight_decay=0.01)
    draw = random.Random(seed)
    begun, right, step = time.monotonic(), 0.0, 0
    while time.monotonic() - begun < seconds and (right < 0.985 or step < LEAST_STEPS):
        length = draw.choice(LENGTHS)
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
            group["lr"] = 5e-4 * min(1.0, (step + 1) / 50)
        torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        now = float((logits_NV.argmax(-1) == answers_N).float().mean())
        right = 0.95 * right + 0.05 * now
    return decoder, right


@torch.no_grad()
def _circuit(decoder: Decoder) -> None:
    """Begin with the two heads of an induction circuit, roughly: left to themselves, they take most of a
    training to appear. The first layer copies the token before into the other half of the channels; the
    second looks from a key to where that key was the token before, and copies what stands there.
    """
    config = decoder.config
    half, size, quarter = config.hidden_size // 2, config.head_size, config.head_size // 2
    first, second = decoder.blocks()
    decoder.embed.weight[:, :half] = torch.randn(config.vocab_size, half) * SIZE
    q, k, v = first.qkv.weight.split((config.q_size, config.kv_size, config.kv_size))
    bias_q, bias_k, _ = first.qkv.bias.split((config.q_size, config.kv_size, config.kv_size))
    cos, sin = (angle[0, 0] for angle in decoder.rotary.angles(torch.ones(1), torch.float32))
    for head in bias_q.view(-1, 2, quarter):
        head[0, :LOOKING], head[1, :LOOKING] = STRENGTH * cos[:LOOKING], -STRENGTH * sin[:LOOKING]
    bias_k.view(-1, 2, quarter)[:, 0, :LOOKING] = STRENGTH
    share = config.num_heads // config.num_kv_heads
    channel = torch.arange(size)
    for layer, into, scale in ((first, half, 0.35), (second, 0, 4.0)):
        q, k, v = layer.qkv.weight.split((config.q_size, config.kv_size, config.kv_size))
        for group in range(config.num_kv_heads):
            at = group * size + channel
            v[at, at] += 1.0
            layer.o.weight[into + at, group * share * size + channel] += scale
            if layer is second:
                slow = channel % quarter >= STEADY
                k[at[slow], half + at[slow]] += MATCH
                for head in range(group * share, (group + 1) * share):
                    q[head * size + channel[slow], at[slow]] += MATCH


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
