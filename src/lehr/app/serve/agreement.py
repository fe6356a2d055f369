"""How far the fast variant of a model agrees with the standard one, measured on the model itself.

The standard engine writes greedy answers to a few prompts. At every position of them the fast engine is asked
for its next token, after the same tokens, through all that makes it fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from lehr.core.task import Message
from lehr.core.trace import Sampling
from lehr.engine.native.engine import NativeEngine
from lehr.engine.native.request import Request
from lehr.engine.native.settings import NativeConfig, standard
from lehr.evals.stats import wilson
from lehr.model.chat import ChatRenderer
from lehr.model.checkpoint import load_decoder
from lehr.model.dtype import compute_dtype
from lehr.model.tokenizer import load_tokenizer

PROMPTS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Write a JSON object with the name, population and area of three countries.",
    "Explain in one paragraph how a bicycle stays upright.",
    "Sort these words by length: lantern, sea, harbour, oak, window.",
    "Write a shell command that counts the lines of all .py files below a folder.",
    "A train leaves at 9:40 and arrives at 12:05. How long does the journey take?",
)
NEW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of ``positions`` next tokens ``same`` were the same. difference: mean |Δ log p| of those, in nats."""

    same: int
    positions: int
    difference: float

    def __str__(self) -> str:
        low, high = wilson(self.same, self.positions)
        return (
            f"same next token as the standard variant at {self.same} of {self.positions} positions "
            f"({self.same / self.positions:.0%}; 95 % interval {low:.0%} to {high:.0%}), "
            f"where log-probabilities differ by {self.difference:.3f} on average"
        )


def measure(folder: Path, fast: NativeConfig) -> Agreement:
    """Compare the model in ``folder`` under ``fast`` with itself under the standard settings. Takes seconds."""
    tokenizer = load_tokenizer(folder)
    renderer = ChatRenderer(tokenizer)
    prompts = [renderer.start((Message(role="user", content=text),)) for text in PROMPTS]

    def engine(config: NativeConfig) -> NativeEngine:
        room = sum(map(len, prompts)) + len(prompts) * (NEW_TOKENS + 16)
        alone = {"cache_tokens": max(config.cache_tokens, room), "tier_memory_bytes": 0, "tier_disk_bytes": 0}
        config = config.model_copy(update=alone)
        return NativeEngine(
            load_decoder(folder, compute_dtype(config.dtype), config.rope_scaling), config=config
        )

    written = _run(engine(standard(fast)), ((p, NEW_TOKENS) for p in prompts))
    ends = [r.prompt_length + i for r in written for i in range(r.own)]
    texts = [r.tokens for r in written for _ in range(r.own)]
    expected = [logprob for r in written for logprob in r.raw_logprobs]
    asked = _run(engine(fast), ((text[:end], 1) for text, end in zip(texts, ends, strict=True)))
    same = [r.tokens[-1] == text[end] for r, text, end in zip(asked, texts, ends, strict=True)]
    apart = [abs(r.raw_logprobs[0] - e) for r, e, s in zip(asked, expected, same, strict=True) if s]
    return Agreement(sum(same), len(same), sum(apart) / max(1, len(apart)))


@torch.inference_mode()
def _run(engine: NativeEngine, jobs: Iterable[tuple[list[int], int]]) -> list[Request]:
    greedy = [(tokens, Sampling(max_tokens=count, temperature=0.0)) for tokens, count in jobs]
    requests = [engine.submit(tokens, sampling) for tokens, sampling in greedy]
    while not engine.idle:
        engine.step()
    return requests
